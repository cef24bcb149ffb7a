"""Answers by the target in torch, many hundreds together: how a GPU writes training texts. On a CPU the engine does.

Prompts of like length are answered together, padded on the right. Every row has its own position in a cache of keys and
values that is as long as the longest prompt and answer; rows that have ended leave it. What is drawn depends on the
seed and on the prompts beside it, up to rounding also where it is greedy: texts to train on, not the engine's bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from wager.arch.layers import Gqa
from wager.models.weights import Weights
from wager.train.answers import OnOutput
from wager.train.target import TorchTarget, check_trainable, compiled, rms_norm
from wager.types import OutputDelta, Request

_CACHE_SHARE = 0.7
"""Of the device's free memory that keys and values take."""
_CPU_CACHE = 256 << 20
_MOST_ROWS = 8192
_PROMPT_TOKENS = 1 << 16
"""Prompt tokens, with padding, of one pass."""
_CHECKED_EVERY = 8
"""Steps between two looks at which rows have ended."""
_WORTH_LEAVING = 0.75
"""Rows that have ended leave the cache when at most this share of its rows is left."""


class TorchAuthor:
    """The target of `weights` as an author of answers (see answers.Author), which end with an id of `eos` and have none
    of `suppressed`. UsageError for a target that TorchTarget does not compute."""

    batch = 1 << 14

    def __init__(
        self,
        weights: Weights,
        *,
        eos: Collection[int],
        precision: str,
        device: str,
        suppressed: Collection[int] = (),
    ) -> None:
        dtype, (attention, _) = getattr(torch, precision), check_trainable(weights.spec)
        self._target = TorchTarget(weights, (0,), dtype=dtype, device=device, positions=weights.spec.context)
        self._eos = torch.tensor(sorted(eos), dtype=torch.int64, device=device)
        self._barred = torch.zeros(weights.spec.vocab, device=device)
        self._barred[list(suppressed)] = float("-inf")
        self._token_bytes = weights.spec.num_layers * attention.cache_width * dtype.itemsize
        self._memory = _CPU_CACHE
        if device == "cuda":
            self._memory = int(_CACHE_SHARE * torch.cuda.mem_get_info()[0])

    def write(self, requests: Sequence[Request], on_output: OnOutput | None = None) -> list[tuple[int, ...] | None]:
        found: list[tuple[int, ...] | None] = [None] * len(requests)
        order = sorted(range(len(requests)), key=lambda place: len(requests[place].prompt))
        while order:
            longest = len(requests[order[-1]].prompt) + max(requests[place].params.max_tokens for place in order)
            rows = min(_MOST_ROWS, max(1, self._memory // (longest * self._token_bytes)))
            places, order = order[-rows:], order[:-rows]
            for place, ids in zip(places, self._together([requests[place] for place in places]), strict=True):
                found[place] = ids
                if on_output is not None:
                    on_output(OutputDelta(requests[place].id, 0, finish_reason="stop"))
        return found

    @torch.no_grad()
    def _together(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """The answers of requests that are written together."""
        device = self._target.device
        rows = _Rows(self._target, requests)
        generator = torch.Generator(device).manual_seed(requests[0].params.seed or 0)
        answers: list[list[int]] = [[] for _ in requests]
        ended = [False] * len(requests)
        while rows.count:
            steps = []
            for _ in range(_CHECKED_EVERY):
                steps.append(rows.draw(generator, self._barred))
                rows.append(steps[-1])
            drawn = torch.stack(steps, 1)
            last = torch.isin(drawn, self._eos).tolist()
            for number, tokens, ends in zip(rows.requests, drawn.tolist(), last, strict=True):
                if not ended[number]:
                    answer, most = answers[number], requests[number].params.max_tokens
                    answer += tokens[: ends.index(True) + 1] if True in ends else tokens
                    ended[number] = True in ends or len(answer) >= most
                    del answer[most:]
            alive = [row for row, number in enumerate(rows.requests) if not ended[number]]
            if len(alive) <= _WORTH_LEAVING * rows.count:
                rows.keep(alive)
        return [tuple(answer) for answer in answers]


def _chosen(final: Tensor, head: Tensor, scale: Tensor, barred: Tensor, exponential: Tensor, noise: Tensor) -> Tensor:
    """The tokens int64 [rows] that are first by logits and noise, see _Rows.draw."""
    logits = functional.linear(final.to(head.dtype), head).float() * scale + barred
    return (logits - exponential.log() * noise).argmax(-1)


def _attended(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Attention of one row of each text, q [rows, kv, g, d], over keys and values [rows, kv, L, d] that are not
    `hidden` bool [rows, L]."""
    scores = (q @ keys.transpose(-1, -2)).float() * scale
    shares = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
    return shares.to(values.dtype) @ values


def _aligned(length: int) -> int:
    """A length of keys that a GPU's fast products take, not below `length`."""
    return -(-length // 16) * 16


class _Rows:
    """Requests that are being answered: `requests` are their numbers; row i has `positions[i]` tokens in the cache, and
    `final[i]` is the state behind the last of them."""

    def __init__(self, target: TorchTarget, requests: Sequence[Request]) -> None:
        self._target, device = target, target.device
        self.requests = list(range(len(requests)))
        lengths = [len(request.prompt) for request in requests]
        self._longest = max(lengths)
        room = self._longest + max(request.params.max_tokens for request in requests)
        self._room = min(_aligned(room), len(target.rotation))
        attention = cast(Gqa, target.spec.attention)
        shape = (len(requests), attention.kv_heads, self._room, attention.head_dim)
        self._caches = [
            (
                torch.zeros(shape, dtype=target.dtype, device=device),
                torch.zeros(shape, dtype=target.dtype, device=device),
            )
            for _ in target.layers
        ]
        self.positions = torch.tensor(lengths, device=device)
        temperature = torch.tensor([request.params.temperature for request in requests], device=device)[:, None]
        self._scale, self._noise = 1 / temperature.clamp(min=1e-3), (temperature > 0).float()
        at_once = max(1, _PROMPT_TOKENS // max(lengths))
        self.final = torch.cat(
            [self._read(requests[first : first + at_once], first) for first in range(0, len(requests), at_once)]
        )

    @property
    def count(self) -> int:
        return len(self.requests)

    def draw(self, generator: torch.Generator, barred: Tensor) -> Tensor:
        """The next token of every row, int64 [rows]: argmax of the logits, with Gumbel noise where a row is sampled.
        `barred` [V], -inf for ids that are never drawn, is added."""
        target = self._target
        exponential = torch.empty(self.count, len(barred), device=target.device).exponential_(generator=generator)
        choose = compiled(_chosen, target.device)
        return choose(self.final, target.head, self._scale, barred, exponential, self._noise)

    def append(self, tokens: Tensor) -> None:
        """Compute a token of every row, behind those that it has."""
        target = self._target
        at = self.positions.clamp(max=self._room - 1)  # rows that have ended run on until they are left out
        rotation = target.rotation[at]
        self._longest = min(self._longest + 1, self._room)
        width = min(_aligned(self._longest), self._room)
        columns = torch.arange(width, device=target.device)
        rows = torch.arange(self.count, device=target.device)
        x = functional.embedding(tokens, target.embedding).float()
        attend = compiled(_attended, target.device)
        for number, described in enumerate(target.spec.ordered_layers):
            attention, (keys, values) = cast(Gqa, described.attention), self._caches[number]
            q, k, v = (part.transpose(0, 1) for part in target.projected(number, attention, x, rotation))
            keys[rows, :, at], values[rows, :, at] = k, v
            hidden = columns > at[:, None]
            if attention.window is not None:
                hidden |= columns <= at[:, None] - attention.window
            scale = target.spec.details.attention_scale or attention.head_dim**-0.5
            grouped = q.reshape(self.count, attention.kv_heads, -1, attention.head_dim)
            found = attend(grouped, keys[:, :, :width], values[:, :, :width], hidden, scale)
            x = target.behind(number, x, found.flatten(1))
        self.final = rms_norm(x, target.final_norm, target.spec.details.norm_eps)
        self.positions = self.positions + 1

    def keep(self, alive: Sequence[int]) -> None:
        """Leave out all other rows."""
        self.requests = [self.requests[row] for row in alive]
        kept = torch.tensor(alive, dtype=torch.int64, device=self._target.device)
        for layer, (keys, values) in enumerate(self._caches):  # one after the other, so that little is held twice
            self._caches[layer] = keys[kept], values[kept]
        self.positions, self.final = self.positions[kept], self.final[kept]
        self._scale, self._noise = self._scale[kept], self._noise[kept]

    def _read(self, requests: Sequence[Request], first: int) -> Tensor:
        """Compute prompts, those of the rows from `first` on; the states [n, H] behind them."""
        target = self._target
        lengths = [len(request.prompt) for request in requests]
        tokens = torch.zeros(len(requests), max(lengths), dtype=torch.int64)
        for row, request in enumerate(requests):
            tokens[row, : lengths[row]] = torch.tensor(request.prompt)
        rows = slice(first, first + len(requests))

        def remember(number: int, k: Tensor, v: Tensor) -> None:
            self._caches[number][0][rows, :, : k.shape[2]] = k
            self._caches[number][1][rows, :, : v.shape[2]] = v

        (x,) = deque(target.residuals(tokens.to(target.device), remember), maxlen=1)  # of the last layer alone
        last = torch.tensor(lengths, device=target.device) - 1
        behind = x[torch.arange(len(requests), device=target.device), last]
        return rms_norm(behind, target.final_norm, target.spec.details.norm_eps)
