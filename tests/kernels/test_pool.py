"""Threads that wait: they use no processor while idle, keep nobody waiting on a busy machine, and change no token; and
which kernels are selected, with how many threads, and the reason given."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from wager.errors import UsageError
from wager.kernels import _native
from wager.kernels.arrays import BFLOAT16
from wager.kernels.cpu import ISAS, Kernels, _quota, physical_cores, select

US, MS, S = 10**3, 10**6, 10**9
HANGS_S = 300


def run_process(program: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Of a program in a process of its own, which may not hang or end otherwise."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(command, timeout=HANGS_S, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stderr
    return run


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_idle_engine_uses_no_processor() -> None:
    used = run_process("""
        import time
        import wager
        with wager.LLM("random:llama:tiny", threads=3, drafter="none") as llm:
            llm.generate([1, 2, 3], wager.SamplingParams(max_tokens=8))
            before = time.process_time()
            time.sleep(1)
            print(time.process_time() - before)
    """)
    assert float(used.stdout) < 0.2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be kept on one processor here")
def test_threads_without_a_processor_of_their_own_keep_nobody_waiting() -> None:
    """Four threads and three other programs on one processor. Where all wait for all at every op, each token takes a
    switch of threads per op and thread."""
    switches = run_process("""
        import os, resource, subprocess, sys
        import wager
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        params = wager.SamplingParams(max_tokens=300, ignore_eos=True)
        with wager.LLM("random:llama:tiny", threads=1, drafter="none", max_context=512) as llm:
            expected = llm.generate([1, 2, 3], params).token_ids
        spin = f"import os\\nwhile os.getppid() == {os.getpid()}: pass"
        neighbours = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
        try:
            with wager.LLM("random:llama:tiny", threads=4, drafter="none", max_context=512) as llm:
                before = resource.getrusage(resource.RUSAGE_SELF)
                found = llm.generate([1, 2, 3], params).token_ids
                after = resource.getrusage(resource.RUSAGE_SELF)
        finally:
            for neighbour in neighbours:
                neighbour.kill()
                neighbour.wait()
        assert tuple(found) == tuple(expected) and len(found) == 300
        print(after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw)
    """)
    assert int(switches.stdout) < 1500  # five a token


@pytest.mark.slow
def test_no_wake_up_is_lost() -> None:
    """Threads that fall asleep just when work begins: pauses about as long as they spin, every op shared by all."""
    run_process("""
        import time
        import numpy as np
        from wager.kernels import _native
        from wager.kernels.arrays import BFLOAT16, zeros
        from wager.kernels.cpu import Kernels
        for always_all in (False, True):
            kernels = Kernels(threads=3)
            kernels.pool = _native.Pool(3, always_all=always_all)
            tape = kernels.tape(max_rows=1, max_sequences=1, max_blocks=1)
            x, out = np.ones((1, 16), BFLOAT16), zeros(1, 320)
            for _ in range(4):
                tape.linear(x, kernels.pack(np.ones((320, 16), np.float32)), out)
            tape.inputs.parents[0], tape.inputs.query_start_loc[1] = -1, 1
            for pause in np.random.default_rng(0).uniform(0, 300e-6, 1500):
                out.fill(0)
                tape.run(rows=1, sequences=1, logits_rows=0)
                assert bool((out == 16).all())
                end = time.perf_counter() + pause
                while time.perf_counter() < end:
                    pass
    """)


def test_a_forked_child_can_compute():
    """Threads do not survive a fork: the child must start its own and not wait for its parent's."""
    program = """
        import os
        import numpy as np
        from wager.kernels.arrays import BFLOAT16, zeros
        from wager.kernels.cpu import Kernels
        kernels = Kernels(threads=3)
        tape = kernels.tape(max_rows=4, max_sequences=1, max_blocks=1)
        x, out = np.ones((4, 16), BFLOAT16), zeros(4, 320)
        tape.linear(x, kernels.pack(np.ones((320, 16), np.float32)), out)
        tape.inputs.parents[0], tape.inputs.query_start_loc[1] = -1, 1
        for place in ("parent", "child"):
            out.fill(0)
            tape.run(rows=1, sequences=1, logits_rows=0)
            assert bool((out[0] == 16).all()), place
            if place == "parent" and (child := os.fork()):
                _, status = os.waitpid(child, 0)
                raise SystemExit(os.waitstatus_to_exitcode(status))
    """
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    run_process(program)


# ---- how many threads share the work, on a clock of the test ---------------------------------------------------------


class Machine:
    """Work of 1 ms for one thread, half of it for two and so on, on a made-up clock of nanoseconds."""

    def __init__(self, threads: int) -> None:
        self.limit = _native.ThreadLimit(threads)
        self.now = 0

    def work(self, *, wait: int) -> int:
        """Its time, if the first thread waits for `wait` where there is another to wait for."""
        self.limit.begin(self.now)
        team = self.limit.limit
        waited = wait if team > 1 else 0
        taken = MS // team + waited
        self.now += taken
        self.limit.worked(self.now, team, waited)
        return taken

    def run(self, seconds: int, *, wait: int) -> int:
        """How often the work is done in this time."""
        end, done = self.now + seconds, 0
        while self.now < end:
            self.work(wait=wait)
            done += 1
        return done


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_with_threads_that_do_not_run_one_works_nearly_alone_and_all_come_back(threads: int) -> None:
    for wait in (3 * MS, 12 * MS, 100 * MS):
        machine = Machine(threads)
        machine.run(S, wait=wait)
        assert machine.run(20 * S, wait=wait) >= 20 * S / MS / 1.15
    machine = Machine(threads)
    machine.run(10 * S, wait=30 * MS)
    machine.run(2 * S, wait=0)
    assert machine.limit.limit == threads


def test_waking_threads_for_less_work_than_waking_takes_does_not_pay() -> None:
    machine = Machine(2)
    for _ in range(100):
        machine.limit.begin(machine.now)
        machine.limit.woke()
        machine.now += 20 * US
        machine.limit.worked(machine.now, team=1, waited=0)
    assert machine.limit.limit == 1
    alone = Machine(1)
    alone.run(S, wait=10 * MS)
    assert alone.limit.limit == 1, "never less"


@pytest.mark.slow
def test_threads_that_waited_long_for_the_caller_share_its_next_stage() -> None:
    """They sleep by then. Were they left out, the caller would do all stages but the first alone. On a busy machine it
    may do so rightly: one of many pools must show it."""
    assert any(_native.Pool(2).team_sizes(stages=100, nanoseconds=MS).count(2) > 50 for _ in range(100))


# ---- which kernels, and how many threads -----------------------------------------------------------------------------


def test_what_the_kernels_lack_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="threads = 0"):
        select(threads=0)
    for sizes in ({"head_dim": 24}, {"head_dim": 528}, {"latent": (40, 16)}, {"latent": (64, 8)}):
        with pytest.raises(UsageError, match="multiple of 16 up to 512"):
            select(**sizes)

    class Bare:
        @staticmethod
        def has(name):
            return name == "portable"

    monkeypatch.setattr(_native, "Isa", Bare)
    monkeypatch.setenv("WAGER_ISA", "avx512")
    with pytest.raises(UsageError, match="no avx512"):
        select()


def test_the_best_that_is_built_is_taken_with_a_thread_a_core(monkeypatch):
    monkeypatch.delenv("WAGER_ISA", raising=False)
    kernels = select(threads=3)
    best = next(isa for isa in ISAS if _native.Isa.has(isa))
    assert kernels.name == Kernels(isa=best).name and "best" in kernels.reason
    assert kernels.act == BFLOAT16 and kernels.threads == 3
    assert select().threads == physical_cores() >= 1


def test_environment_forces_an_instruction_set(monkeypatch):
    monkeypatch.setenv("WAGER_ISA", "portable")
    kernels = select(threads=1)
    assert kernels.name == "native portable" and "WAGER_ISA" in kernels.reason
    monkeypatch.setenv("WAGER_ISA", "avx1024")
    with pytest.raises(UsageError, match="avx1024"):
        select()


@pytest.mark.parametrize("verb", [["doctor"], ["run", "--model", "random:llama:tiny", "a"]])
def test_without_the_extension_every_verb_says_what_to_do(verb):
    """Nothing slower is taken in its place."""
    program = f"""
        import sys
        sys.modules["wager.kernels._native"] = None  # importing it fails
        from wager.cli import main
        sys.exit(main({verb}))
    """
    run = run_process(program, code=1)
    assert run.stdout == ""
    assert run.stderr.startswith("error: wager's C++ extension cannot be imported: ")
    assert "hint: Install wager again" in run.stderr and "Traceback" not in run.stderr


def test_a_containers_quota_bounds_the_threads(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    for text, most in (("250000 100000", 2), ("50000 100000", 1), ("max 100000", os.cpu_count() or 1)):
        limit.write_text(text + "\n")
        assert _quota(limit) == most
    assert _quota(tmp_path / "absent") == (os.cpu_count() or 1)


NEEDED = {
    "avx2": ["avx2", "fma", "f16c"],
    "avxvnni": ["avx2", "fma", "f16c", "avx_vnni"],
    "avx512": ["avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "avx512vbmi"],
    "neon": ["asimddp"],
    "i8mm": ["asimddp", "i8mm", "bf16"],
    "portable": [],
}


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="/proc/cpuinfo of x86-64")
def test_the_processors_features_are_those_that_linux_lists() -> None:
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    assert NEEDED.keys() == set(ISAS)
    assert {isa: _native.Isa.has(isa) for isa in ISAS} == {isa: flags.issuperset(NEEDED[isa]) for isa in ISAS}
