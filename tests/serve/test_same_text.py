"""The same request with the same seed gets the same answer from a `wager serve` process on the real model: alone, in a
crowd of 32, streamed or not, whatever drafts and however the request says it wants to be drafted.

`python dev/check_same_text.py` does the same with more prompts and drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wager
from serve.same_requests import CHAT, Answer, ServedProcess, Variant, cases, served_process, variants
from wager.loading.drafters import FOLDER
from wager.prompts import encode_chat
from wager.types import SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.slow]

CASES = cases()
ALONE = Variant(stream=True, stats=True)
STORE = FOLDER / "SmolLM2-135M-Instruct.store"

Reference = Mapping[str, Answer]


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Iterator[ServedProcess]:
    with served_process(smollm2, "--threads", "1", "--drafter", "none") as server:
        yield server


@pytest.fixture(scope="module")
def reference(plain: ServedProcess) -> Reference:
    """Every request alone, without a drafter."""
    return {case.name: plain.ask(case, ALONE) for case in CASES}


def crowd(server: ServedProcess, reference: Reference, choices: Iterator[Variant]) -> list[Answer]:
    """Every request once, 32 at a time, each in the next of the variants."""
    work = list(zip(CASES, choices, strict=False))
    found, answers = server.differences([reference[case.name] for case in CASES], work)
    assert found == []
    return answers


def test_the_requests_are_of_every_kind(reference: Reference) -> None:
    """Else the comparison would say little."""
    answers = list(reference.values())
    reasons = {choice.finish_reason for answer in answers for choice in answer.choices}
    assert {"stop", "length"} <= reasons, "kernels of other processors write other texts"
    assert any(choice.calls for answer in answers for choice in answer.choices)
    assert len({choice.text for answer in answers for choice in answer.choices}) > len(CASES) * 0.8
    for case in CASES:
        for choice in reference[case.name].choices:
            assert choice.ids and choice.logprobs and not choice.drafted
            if case.kind == CHAT and not choice.calls:
                spelled = b"".join(bytes(item[2]) for item in choice.logprobs).decode("utf-8", "replace")
                assert choice.text in spelled.replace("<|im_end|>", "").replace("<|im_start|>", "")


def test_in_a_crowd_without_a_drafter(plain: ServedProcess, reference: Reference) -> None:
    crowd(plain, reference, variants([], seed=1))
    assert plain.metric("spec_decode_num_drafts_total") == 0


def test_with_the_default_drafter_alone_and_in_a_crowd(smollm2: Path, reference: Reference) -> None:
    with served_process(smollm2, "--threads", "1") as server:
        for turn, case in enumerate(CASES):
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


def test_the_library_gives_the_same_without_a_server(smollm2: Path, reference: Reference) -> None:
    fields = {"greedy": dict(temperature=0.0), "sampled": dict(temperature=0.8, seed=11)}
    with wager.LLM(str(smollm2), threads=1, drafter="ngram") as llm:
        for sampling, params in fields.items():
            for case in CASES:
                if case.kind == CHAT and case.name.endswith(f"plain {sampling}"):
                    prompt: Any = encode_chat(llm.tokenizer, case.body["messages"])
                    answer = llm.generate([prompt], SamplingParams(24, logprobs=3, **params))[0]  # type: ignore[arg-type]
                    [choice] = reference[case.name].choices
                    assert choice.ids == answer.token_ids and choice.text == answer.text
                    assert [item[1] for item in choice.logprobs] == [item.logprob for item in answer.logprobs]
