"""The same request with the same seed gets the same answer from a `wager serve` process on the real model: alone, in a
crowd of 32, streamed or not, whatever drafts and however the request says it wants to be drafted.

`python dev/check_same_text.py` does the same with more prompts and drafters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from serve.same_requests import Answer, ServedProcess, Variant, cases, served_process, variants
from wager.models.hub import SHIPPED

pytestmark = [pytest.mark.real, pytest.mark.slow]

CASES = cases()
ALONE = Variant(stream=True, stats=True)
STORE = SHIPPED / "SmolLM2-135M-Instruct.store"

Reference = Mapping[str, Answer]


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Iterator[ServedProcess]:
    with served_process(smollm2, "--threads", "1", "--drafter", "none") as server:
        yield server


@pytest.fixture(scope="module")
def reference(plain: ServedProcess) -> Reference:
    """Every request alone, without a drafter."""
    return {case.name: plain.ask(case, ALONE) for case in CASES}


def crowd(server: ServedProcess, reference: Reference, choices: Iterator[Variant]) -> None:
    """Every request once, 32 at a time, each in the next of the variants."""
    work = list(zip(CASES, choices, strict=False))
    found, _ = server.differences([reference[case.name] for case in CASES], work)
    assert found == []


def test_answers_that_must_follow_a_schema_do(reference: Reference) -> None:
    choices = [choice for case in CASES if " schema " in case.name for choice in reference[case.name].choices]
    complete = [json.loads(choice.text) for choice in choices if choice.finish_reason == "stop"]
    assert complete and all(list(value) == ["name", "age"] and type(value["age"]) is int for value in complete)


def test_with_the_default_drafter_alone_and_in_a_crowd(smollm2: Path, reference: Reference) -> None:
    with served_process(smollm2, "--threads", "1") as server:
        for turn, case in enumerate(CASES[::2]):
            variant = Variant(stream=turn % 2 == 0, official=turn % 4 < 2, logprobs=turn % 3 > 0)
            found, _ = server.differences([reference[case.name]], [(case, variant)], users=1)
            assert found == []
        crowd(server, reference, variants(["store"], seed=2))
        assert server.metric("spec_decode_num_accepted_tokens_total", drafter="store") > 100
        assert server.metric("prompt_tokens_cached_total") > 1000, "the second time their prompts are known"


def test_with_every_kind_of_drafter_in_a_cache_that_is_too_small(
    smollm2: Path, reference: Reference, tmp_path: Path
) -> None:
    config = tmp_path / "small.toml"
    config.write_text("cache-tokens = 384\nmax-rows = 96\n")
    names = {
        "store:tree": f"store:tree:{STORE}",
        "ngram": "ngram",
        "suffix:tree": "suffix:tree",
        "recycle": "recycle",
        "prediction": "prediction",
        "layers": "layers:0-3",
    }
    flags = ("--threads", "1", "--config", str(config), "--drafter", ",".join(names.values()))
    with served_process(smollm2, *flags) as server:
        crowd(server, reference, variants(list(names), seed=3))
        assert server.metric("num_preemptions_total") > 0
        for name in names:
            assert server.metric("spec_decode_num_drafts_total", drafter=name) > 0, name


def test_the_seed_that_an_answer_names_gives_it_again(plain: ServedProcess) -> None:
    case = next(case for case in CASES if case.name == "chat choices narrow")
    unseeded = replace(case, body={name: value for name, value in case.body.items() if name != "seed"})
    first, other = (plain.ask(unseeded, ALONE) for _ in range(2))
    assert first.choices != other.choices
    [seed] = {each["seed"] for each in first.rounds}
    found, _ = plain.differences([first], [(replace(case, body={**unseeded.body, "seed": seed}), Variant())], users=1)
    assert found == []
