"""What it would gain to price each guess by the experts that it adds, instead of by the mean of its row count.

    python dev/measure_guess_prices.py random:qwen3-moe:300m prompts.jsonl [--texts 40] [--rounds 400]

Experts are those that the model chose at every position of the prompts. In a round each of R requests stands at a
position of a text of its own and has a chain of DEPTH guesses. Their conditional acceptance is calibrated and scatters;
a guess that is accepted is the text's next token, with its experts, a wrong one another token of that text. A step's
seconds are the bytes that it reads: what every step reads, and the experts hit. Policies: `never` drafts; `fixed` takes
the best depth for all; `mean` takes guesses by survival and prices the number of rows, as wager does; `token` prices
each guess by the experts that its token chose in other texts; `known` is told every guess's experts, which no policy
can know before the pass: a bound. The latter two begin with `mean` and change one request's depth after the other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wager.kernels.cpu import Kernels
from wager.models.random_models import make
from wager.models.transformer import Decoder
from wager.profiling.texts import Choices, record_choices

DEPTH, SCATTER, CONTEXT = 8, 1.5, 1024
"""Guesses of a chain, the deviation of the log-odds of their acceptance, and most tokens of a text."""
PRIOR = 4.0
"""Choices of any token that count beside a token's own."""
REQUESTS, ACCEPTANCE = (1, 2, 4, 8, 16), (0.5, 0.7, 0.85)


@dataclass
class Round:
    """`hits` bool [requests, 1 + DEPTH, layers, experts] of every row, `expected` the same as float32 probabilities by
    the row's token; `survival` [requests, DEPTH] of every guess."""

    hits: NDArray[np.bool_]
    expected: NDArray[np.float32]
    survival: NDArray[np.float64]


@dataclass
class Text:
    """`hits` bool [positions, layers, experts], and the `tokens` there."""

    tokens: list[int]
    hits: NDArray[np.bool_]


class ByToken:
    """How often each token chose an expert in some texts, drawn towards how often any token did."""

    def __init__(self, texts: Sequence[Text]) -> None:
        every = np.concatenate([text.hits for text in texts])
        tokens = np.concatenate([text.tokens for text in texts])
        self.any = every.mean(axis=0, dtype=np.float32)
        groups = {int(token): every[tokens == token] for token in np.unique(tokens)}
        self.of = {
            token: (own.sum(axis=0, dtype=np.float32) + PRIOR * self.any) / (len(own) + PRIOR)
            for token, own in groups.items()
        }

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        return np.array([self.of.get(token, self.any) for token in tokens])


def one_round(texts: Sequence[Text], known: ByToken, requests: int, mean: float, rng: np.random.Generator) -> Round:
    centre = np.log(mean / (1 - mean))
    rates = 1 / (1 + np.exp(-(centre + SCATTER * rng.standard_normal((requests, DEPTH)))))
    hits, expected = [], []
    for number, chain in zip(rng.permutation(len(texts))[:requests], rates, strict=True):
        text = texts[number]
        at, right = rng.integers(len(text.hits) - DEPTH), np.logical_and.accumulate(rng.random(DEPTH) < chain)
        places = np.where(right, at + 1 + np.arange(DEPTH), rng.integers(len(text.hits), size=DEPTH))
        places = np.concatenate([[at], places])
        hits.append(text.hits[places])
        expected.append(known([text.tokens[place] for place in places]))
    return Round(np.array(hits), np.array(expected), np.cumprod(rates, axis=1))


def distinct(hits: NDArray[np.bool_], depths: Sequence[int]) -> int:
    rows = [own[: 1 + depth].any(axis=0) for own, depth in zip(hits, depths, strict=True)]
    return int(np.count_nonzero(np.logical_or.reduce(rows)))


Policy = Callable[[Round, float], Sequence[int]]


class Comparison:
    """Policies over the same rounds. An expert read costs one second, what every step reads `steady`."""

    def __init__(self, rounds: Sequence[Round], steady: float) -> None:
        self.rounds, self.steady, self.requests = rounds, steady, len(rounds[0].hits)
        self.curve = [
            np.mean([distinct(each.hits, [depth] * self.requests) for each in rounds]) for depth in range(DEPTH + 1)
        ]

    def goodput(self, policy: Policy) -> float:
        """Tokens a second of the policy that maximises tokens - goodput * seconds at its own goodput."""
        found = 0.0
        for _ in range(6):
            tokens = seconds = 0.0
            for each in self.rounds:
                depths = policy(each, found)
                tokens += self.requests + sum(
                    own[:depth].sum() for own, depth in zip(each.survival, depths, strict=True)
                )
                seconds += self.steady + distinct(each.hits, depths)
            found = tokens / seconds
        return found

    def mean(self, each: Round, goodput: float) -> Sequence[int]:
        gains = np.sort(each.survival.ravel())[::-1]
        rows = np.arange(len(gains) + 1) / self.requests
        price = goodput * np.interp(rows, np.arange(DEPTH + 1), self.curve)
        taken = int(np.argmax(np.concatenate([[0.0], np.cumsum(gains)]) - price))
        least = gains[taken - 1] if taken else 2.0
        return [int(np.count_nonzero(own >= least)) for own in each.survival]

    def known(self, each: Round, goodput: float) -> Sequence[int]:
        return self.changed(each, each.hits.astype(np.float32), goodput)

    def token(self, each: Round, goodput: float) -> Sequence[int]:
        return self.changed(each, each.expected, goodput)

    def changed(self, each: Round, hits: NDArray[np.float32], goodput: float) -> Sequence[int]:
        """Depths by the experts that are expected to be hit, of the probabilities `hits` of every row."""
        depths = list(self.mean(each, goodput))
        missed = np.cumprod(1 - hits, axis=1)  # by depth, of the rows of a request so far
        gains = np.concatenate([np.zeros((self.requests, 1)), np.cumsum(each.survival, axis=1)], axis=1)
        for _ in range(10):
            before = list(depths)
            for own in range(self.requests):
                others = [missed[i, depths[i]] for i in range(self.requests) if i != own]
                free = np.prod(others, axis=0) if others else np.ones_like(missed[0, 0])
                net = gains[own] - goodput * ((1 - missed[own]) * free).sum(axis=(1, 2))
                depths[own] = int(np.argmax(net))
            if depths == before:
                break
        return depths


def recorded(model: str, prompts: Path, texts: int) -> tuple[list[Text], float]:
    """The texts with what was chosen at each position; and what every step reads, in experts."""
    weights, tokenizer = make(model)
    spec = weights.spec
    assert spec.experts is not None
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    asked = [str(row.get("prompt") or row["turns"][0]) for row in rows]
    ids = [tokenizer.encode(text)[:CONTEXT] for text in asked if len(text) > 20 * DEPTH][:texts]
    kernels = Kernels(threads=2)
    sizes: dict[str, Any] = {"num_blocks": CONTEXT // 16, "max_rows": 128, "max_sequences": 1}
    decoder = Decoder(weights, kernels, **sizes, max_blocks=CONTEXT // 16, keep_expert_choices=True)
    choices: list[Choices] = record_choices(decoder, ids, max_tokens=0, max_context=CONTEXT)
    found = []
    for tokens, text in zip(ids, choices, strict=True):
        hit = np.zeros((*text.shape[:2], spec.experts.count), np.bool_)
        np.put_along_axis(hit, text.astype(np.int64), True, axis=2)
        found.append(Text(list(tokens), hit))
    elements = spec.elements()
    steady = sum(elements[part] for part in ("projections", "ffn", "router", "shared", "head"))
    return found, steady / spec.experts.expert(spec.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    every, steady = recorded(options.model, options.prompts, 2 * options.texts)
    known, texts = ByToken(every[: options.texts]), every[options.texts :]
    print(
        f"{options.model}: {len(texts)} texts, {sum(len(t.hits) for t in texts)} positions, steady {steady:.0f} experts"
    )
    print("acceptance requests | over never: fixed, mean | over mean: token, known")
    for acceptance in ACCEPTANCE:
        for requests in REQUESTS:
            rng = np.random.default_rng(requests)
            rounds = [one_round(texts, known, requests, acceptance, rng) for _ in range(options.rounds)]
            compared = Comparison(rounds, steady)
            never = compared.goodput(lambda each, _: [0] * len(each.hits))
            fixed = max(compared.goodput(lambda each, _, d=d: [d] * len(each.hits)) for d in range(DEPTH + 1))
            mean = compared.goodput(compared.mean)
            more = [100 * (compared.goodput(policy) / mean - 1) for policy in (compared.token, compared.known)]
            print(
                f"{acceptance:10.2f} {requests:8d} | {fixed / never:6.3f} {mean / never:6.3f} | "
                f"{more[0]:+5.2f} % {more[1]:+5.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
