"""--draft-threads: the options, loaded drafters with threads of their own, and that these overlap with the target's."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from test_drafter_combinations import TEXTS, requests
from tokenizer_models import save_model

import wager
from in_process import Call
from in_process import wager as command  # noqa: F401
from wager.draft.ahead import AheadDrafter
from wager.errors import UsageError
from wager.kernels.cpu import physical_cores
from wager.loading.load import LoadedEngine, load


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft model of the same tokenizer."""
    target, draft = (save_model(tmp_path_factory.mktemp("model"), num_hidden_layers=layers) for layers in (3, 1))
    return target, draft


def _draft_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("wager-draft-")]


def _drafter(engine: LoadedEngine) -> AheadDrafter:
    (drafter,) = (each for each in engine.proposer.drafters.values() if isinstance(each, AheadDrafter))
    return drafter


WRITTEN = ["model:{1}", "model:{0}", "model:{1}+ngram", "model:tree:{0}", "layers:0-1", "layers:tree:0-1", "tli:{0}"]


@pytest.mark.parametrize("written", [*WRITTEN, "slem:{0}", "ngram,model:{0}"])
def test_loaded_drafters_with_threads_change_no_text(models: tuple[str, str], written: str) -> None:
    """Greedy, sampled and with penalties, together in a cache that is too small for all, then with a warm one."""
    options = {"model": models[0], "max_rows": 32, "max_sequences": 4, "cache_tokens": 96}
    plain = load(wager.EngineConfig.from_options(**options, drafter="none"))
    wanted = plain.generate(requests(plain, TEXTS), concurrency=3)
    policy = {} if "," in written else {"depth": 3}
    engine = load(
        wager.EngineConfig.from_options(**options, **policy, drafter=written.format(*models), draft_threads=1)
    )
    for concurrency in (3, 5, 1):
        got = engine.generate(requests(engine, TEXTS), concurrency=concurrency)
        assert [each.token_ids for each in got] == [each.token_ids for each in wanted]
    (figures,) = engine.ahead.values()
    if policy:
        assert figures.hits + figures.misses > 10 and figures.waited_s > 0 and figures.drafted_s > 0
    # random models write no whole characters, and end within a tree
    if "{0}" in written and policy and not written.startswith(("slem", "model:tree")):
        assert figures.hits > 10 and sum(each.stats.accepted for each in got) > 10
    engine.close()
    engine.close()
    assert not _draft_threads()


def test_a_closed_model_leaves_no_thread(models: tuple[str, str]) -> None:
    with wager.LLM(model=models[0], drafter="layers:0", depth=3, draft_threads=1, max_rows=32) as llm:
        llm.generate("one two three", wager.SamplingParams(max_tokens=8))
        stream = llm.stream("one two three", wager.SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)  # closed while the drafter is at work
        assert _draft_threads()
    assert not _draft_threads()


def test_the_target_leaves_cores_to_the_drafter(models: tuple[str, str]) -> None:
    options = {"model": models[0], "drafter": "layers:0", "max_rows": 32}
    engine = load(wager.EngineConfig.from_options(**options, draft_threads=1))
    assert getattr(engine.kernels, "threads", 1) == max(1, physical_cores() - 1)
    engine.close()
    engine = load(wager.EngineConfig.from_options(**options, draft_threads=1, threads=2))
    assert getattr(engine.kernels, "threads", 2) == 2
    engine.close()
    engine = load(wager.EngineConfig.from_options(**options))
    assert getattr(engine.kernels, "threads", physical_cores()) == physical_cores() and not engine.ahead


@pytest.mark.slow
def test_a_pass_of_the_drafter_does_not_wait_for_one_of_the_target(models: tuple[str, str]) -> None:
    """Passes release the interpreter, and each has a pool of its own: while the target's runs, the drafter's goes on.
    Here the target's pass is one that does not end before the drafter has drafted. On a busy machine that may be over
    before a pass begins, so most passes must show it."""
    engine = load(wager.EngineConfig.from_options(model=models[0], drafter="layers:0", depth=2, draft_threads=1))
    drafter, forward = _drafter(engine), engine.runner.target.forward
    prepared: list[int] = []

    def slow(batch):  # type: ignore[no-untyped-def]
        before, deadline = drafter.figures.branches, time.monotonic() + 0.5
        output = forward(batch)
        while drafter.figures.branches == before and prepared and time.monotonic() < deadline:
            time.sleep(0.001)
        prepared.append(drafter.figures.branches - before)
        return output

    engine.runner.target.forward = slow  # type: ignore[method-assign]
    engine.generate(requests(engine, TEXTS)[:1])
    assert len(prepared) > 5 and sum(map(bool, prepared)) > len(prepared) / 2
    engine.close()


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "ngram", "draft_threads": 1}, "draft_threads = 1 has no effect with drafter 'ngram'"),
        ({"drafter": "eagle3:/head", "draft_threads": 1}, "has no effect with drafter 'eagle3:/head'"),
        ({"drafter": "layers:0+recycle", "draft_threads": 1}, "has no effect with drafter 'layers:0[+]recycle'"),
        ({"drafter": "ngram//layers:0", "draft_threads": 1}, "has no effect with drafter"),
        ({"drafter": "layers:0", "draft_threads": 100_000}, "draft_threads = 100000 is out of range"),
        ({"drafter": "layers:0", "draft_threads": -1}, "draft_threads = -1"),
        ({"drafter": "layers:0", "draft_threads": True}, "draft_threads = True"),
        ({"drafter": "layers:0", "draft_threads": 1, "verify": "rejection"}, "for the rule match, not rejection"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wager.EngineConfig.from_options(**options)


def test_options_of_a_file_and_of_commands(
    tmp_path: Path,
    models: tuple[str, str],
    command: Call,  # noqa: F811
) -> None:
    file = tmp_path / "options.toml"
    file.write_text('drafter = "layers:0"\ndraft-threads = 1\ndepth = 2\n')
    answer = command("run", "one two", "--raw", "--model", models[0], "--config", str(file), "--max-tokens", "12")
    assert answer.code == 0 and "layers: " in answer.err
    refused = command("run", "one", "--model", models[0], "--drafter", "none", "--draft-threads", "1")
    assert refused.code == 2 and "--draft-threads 1 has no effect with --drafter none" in refused.err
    assert wager.EngineConfig.from_options(drafter="none", draft_threads=1).speculation.draft_threads == 1
    assert not _draft_threads()
