"""What may be used of the memory: the machine's, and what control groups leave; and what a plan says."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

import wager
from wager.cli import main
from wager.errors import MemoryPlanError
from wager.loading import memory
from wager.loading.load import load

GIB = 1 << 30


def system(root: Path, groups: str, files: dict[str, str], *, free: int = 8 * GIB, total: int = 16 * GIB) -> Path:
    """/proc and /sys of a machine whose control groups have these files."""
    texts = {
        "proc/meminfo": f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {free // 1024} kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


NESTED = {
    "memory.max": "max\n",
    "memory.current": f"{9 * GIB}\n",
    "user/memory.max": f"{4 * GIB}\n",
    "user/memory.current": f"{3 * GIB}\n",
    "user/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n",
    "user/job/memory.max": "max\n",
    "user/job/memory.high": f"{5 * GIB}\n",
    "user/job/memory.current": f"{GIB}\n",
}


@pytest.mark.parametrize(
    ("groups", "files", "free", "where"),
    [
        ("0::/\n", {}, 8 * GIB, "this machine"),
        ("0::/user/job\n", NESTED, 3 * GIB, "the control group /user"),
        ("0::/elsewhere/on/the/host\n", {"memory.max": f"{GIB}", "memory.current": "0"}, GIB, "the control group /"),
        (
            "4:memory:/docker/x\n1:cpu:/docker/x\n0::/\n",
            {
                "memory/docker/x/memory.limit_in_bytes": f"{2 * GIB}",
                "memory/docker/x/memory.usage_in_bytes": f"{GIB}",
                "memory/docker/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": f"{GIB}",
            },
            GIB + GIB // 2,
            "the control group /docker/x",
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], free: int, where: str) -> None:
    found = memory.free_memory(system(tmp_path, groups, files))
    assert (found.free, found.where) == (free, where)


def test_a_system_that_does_not_say_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(MemoryPlanError, match="does not report how much memory is free"):
        memory.free_memory(tmp_path)


def limited(monkeypatch: pytest.MonkeyPatch, root: Path, limit: int) -> None:
    files = {"job/memory.max": f"{limit}", "job/memory.current": "0"}
    monkeypatch.setattr(memory, "ROOT", system(root, "0::/job\n", files))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "(80% of the 4.0 MiB that the control group /job has free)"),
        (["--memory", "3MiB"], "3.0 MiB that may be used (--memory)"),
        (["--memory", "2GiB"], "memory = 2.00 GiB is more than the 4.0 MiB of the control group /job."),
    ],
)
def test_a_model_that_does_not_fit_its_control_group_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    limited(monkeypatch, tmp_path, 4 << 20)
    for verb in (["serve", "--port", "0"], ["run", "hi"]):
        assert main([*verb, "--model", "random:llama:tiny", "--threads", "1", *flags]) == 1
        said = capfd.readouterr().err
        fits_not = "The model does not fit: weights" in said and "hint: Lower --max-context" in said
        assert why in said and fits_not == ("is more than" not in why)


def test_a_limit_beyond_what_is_free_gives_a_smaller_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROOT", system(tmp_path, "", {}, free=64 << 20))
    config = wager.EngineConfig.from_options(model="random:llama:tiny", threads=1, drafter="none", memory="1GiB")
    plan = load(config).memory_plan
    assert plan.total <= 64 << 20 < 1.1 * plan.total


def test_a_plan_says_what_is_taken_by_what(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "random:llama:tiny", "--threads", "1", "--memory", "64MiB", "--max-tokens", "2"]
    drafted = ["--drafter", "model:random:llama:tiny", "--depth", "2", "--max-context", "256", "--explain"]
    assert main(["run", "hi", *flags, *drafted]) == 0
    said = capfd.readouterr().err
    for words in ("memory: weights ", "workspace ", "draft model random:llama:tiny ", " of it for drafters)"):
        assert words in said, said
    assert "of 64.0 MiB that may be used (--memory)" in said
    assert main(["run", "hi", *flags]) == 0
    assert "memory: weights " not in capfd.readouterr().err


def test_the_limit_of_the_process_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory.free_memory()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + (64 << 20),) * 2)
    found = memory.free_memory()
    assert found.free <= 64 << 20 < before.free and "ulimit -v" in found.where


def test_memory_that_the_system_refuses_after_all_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("wager.loading.opened.Decoder", refuse)
    assert main(["run", "hi", "--model", "random:llama:tiny", "--threads", "1"]) == 1
    said = capfd.readouterr().err
    assert "error: The system gives no more memory." in said and "hint: Lower --memory" in said


def test_doctor_names_the_limit_that_is_tighter_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "ROOT", system(tmp_path, "0::/job\n", {}))
    assert main(["doctor"]) == 0
    assert "control group" not in capfd.readouterr().out
    limited(monkeypatch, tmp_path, GIB)
    assert main(["doctor"]) == 0
    assert "; the control group /job has 1.0 GiB free of 1.0 GiB" in capfd.readouterr().out
