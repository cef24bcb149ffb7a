"""Answers by the target in torch are what its own teacher-forced passes say, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import tiny_models
import torch
from trained import target_of

from wager.arch import Gqa
from wager.models.random_models import RandomWeights
from wager.models.weights import Weights
from wager.train import answers, generation
from wager.train.generation import TorchAuthor
from wager.train.target import TorchTarget
from wager.types import Request, SamplingParams

VOCAB = 512


def asked(prompts: Sequence[Sequence[int]], **params: float) -> list[Request]:
    return [
        Request(str(number), tuple(prompt), SamplingParams(max_tokens=9 + number % 5, seed=3, **params))  # type: ignore[arg-type]
        for number, prompt in enumerate(prompts)
    ]


def author_of(weights: Weights, eos: Sequence[int] = (), **options: Sequence[int]) -> TorchAuthor:
    return TorchAuthor(weights, eos=eos, precision="float32", device="cpu", **options)


def windowed() -> Weights:
    return RandomWeights(tiny_models.spec((Gqa(4, 2, 16, window=5), Gqa(4, 2, 16))), 1)


@pytest.mark.parametrize("make", [lambda: target_of().weights, windowed], ids=["llama", "sliding window"])
def test_greedy_answers_follow_the_targets_first_choices(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts of other lengths beside them, in several groups, and while rows end before others."""
    weights: Weights = make()  # type: ignore[operator]
    vocab = weights.spec.vocab
    monkeypatch.setattr(generation, "_MOST_ROWS", 7)
    monkeypatch.setattr(generation, "_PROMPT_TOKENS", 40)
    noise = np.random.default_rng(0)
    requests = asked([noise.integers(0, vocab, noise.integers(1, 24)).tolist() for _ in range(20)])
    target = TorchTarget(weights, (0,), dtype=torch.float32, positions=64)
    first_choices = Counter[int]()
    written = author_of(weights).write(requests)
    for request, answer in zip(requests, written, strict=True):
        assert answer is not None and len(answer) == request.params.max_tokens
        ids = torch.tensor([[*request.prompt, *answer]])
        logits = target.logits(target.states(ids, torch.ones(ids.shape)).final)[0]
        assert logits.argmax(-1)[len(request.prompt) - 1 : -1].tolist() == list(answer)
        first_choices.update(answer)
    eos = [token for token, _ in first_choices.most_common(3)]
    ended = author_of(weights, eos).write(requests)
    for whole, answer in zip(written, ended, strict=True):
        assert whole is not None and answer is not None
        ends = [place for place, token in enumerate(whole) if token in eos]
        assert answer == (whole[: ends[0] + 1] if ends else whole)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_no_answer_has_a_suppressed_token(temperature: float) -> None:
    """Those that would be written are left out; greedy answers have the best of the others."""
    weights = target_of().weights
    requests = asked([(5, 6, 7), (9, 8)], temperature=temperature)
    unwanted = sorted({token for answer in author_of(weights).write(requests) for token in answer or ()})
    target = TorchTarget(weights, (0,), dtype=torch.float32, positions=64)
    for request, answer in zip(requests, author_of(weights, suppressed=unwanted).write(requests), strict=True):
        assert answer and not set(answer) & set(unwanted)
        ids = torch.tensor([[*request.prompt, *answer]])
        logits = target.logits(target.states(ids, torch.ones(ids.shape)).final)[0]
        logits[:, unwanted] = float("-inf")
        best = logits.argmax(-1)[len(request.prompt) - 1 : -1].tolist()
        assert temperature or best == list(answer)


def test_the_author_on_a_device_knows_what_the_files_suppress(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    given: dict[str, object] = {}
    make = TorchAuthor.__init__
    monkeypatch.setattr(
        TorchAuthor, "__init__", lambda *args, **options: given.update(options) or make(*args, **options)
    )
    target.tokenizer.suppressed_ids = (3, target.weights.spec.vocab)  # a file may have more tokens than rows
    author = answers.author_of(
        target, device="meta", precision="float32", engine=lambda: pytest.fail("asked"), concurrency=1
    )
    assert isinstance(author, TorchAuthor) and given["suppressed"] == [3]


@pytest.mark.slow
def test_sampled_answers_have_the_targets_distribution() -> None:
    weights = target_of().weights
    request = Request("0", (5, 6, 7), SamplingParams(max_tokens=1, temperature=0.5, seed=1))
    count = 1000
    found = Counter(answer[0] for answer in author_of(weights).write([request] * count) if answer)
    target = TorchTarget(weights, (0,), dtype=torch.float32, positions=8)
    ids = torch.tensor([request.prompt])
    p = (target.logits(target.states(ids, torch.ones(ids.shape)).final)[0, -1] / 0.5).softmax(-1)
    for token in p.topk(5).indices.tolist():
        expected = p[token].item()
        assert abs(found[token] / count - expected) < 4 * (expected / count) ** 0.5 + 1e-3
