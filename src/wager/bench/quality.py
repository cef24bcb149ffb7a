"""How far a model's logits are from those of another arithmetic: KL, top-1 agreement and perplexity on a fixed text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.kernels.arrays import Array
from wager.kernels.base import BLOCK_SIZE
from wager.models.transformer import Decoder
from wager.types import PackedBatch

Logits = NDArray[np.float32]
Window = NDArray[np.int32]

WINDOW = 512
"""Tokens that are read at once, from an empty context."""
_ROWS = 16
"""Rows whose distributions are compared at a time: of 150,000 tokens a few MB each."""


@dataclass(frozen=True, slots=True)
class Quality:
    """`kl` is the mean of KL(reference || model) in nats, `kl_99` its 99th percentile, `top1` the share of positions at
    which both have the same most likely token; perplexities are of the text, whose `tokens` were compared."""

    tokens: int
    kl: float
    kl_99: float
    top1: float
    perplexity: float
    reference_perplexity: float


def fixed_text() -> str:
    """Prose, code, dialogue, letters and tables, about 2,400 tokens of a usual vocabulary."""
    return files("wager.bench").joinpath("quality.txt").read_text(encoding="utf-8")


def windows(tokens: Sequence[int], *, size: int = WINDOW, most: int = 4096) -> Iterator[Window]:
    """The first `most` tokens in windows of `size`; a rest below two tokens is left out."""
    tokens = tokens[:most]
    for first in range(0, len(tokens), size):
        window = np.array(tokens[first : first + size], dtype=np.int32)
        if len(window) > 1:
            yield window


def logits_of(decoder: Decoder, tokens: Array) -> Array:
    """float32 [n, vocab] after each of n token ids (int32), read from an empty context. Overwrites the first blocks of
    the cache. UsageError for more tokens than a sequence may have."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    if blocks > min(decoder.max_blocks, decoder.cache.num_blocks):
        raise UsageError(f"{len(tokens)} tokens are more than the context holds.", "Raise --max-context.")
    step = min(decoder.max_rows, decoder.max_logits_rows)
    out = np.empty((len(tokens), decoder.vocab), np.float32)
    for first in range(0, len(tokens), step):
        rows = np.arange(min(step, len(tokens) - first), dtype=np.int32)
        batch = PackedBatch(
            tokens=tokens[first : first + len(rows)].astype(np.int32),
            positions=first + rows,
            parents=rows - 1,
            slot_mapping=first + rows,
            seq_ids=np.zeros_like(rows),
            query_start_loc=np.array([0, len(rows)], np.int32),
            num_computed_tokens=np.array([first], np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            logits_indices=rows,
        )
        out[first : first + len(rows)] = decoder.forward(batch).model_logits(slice(None))
    return out


def compare_logits(
    reference: Callable[[Window], Logits], model: Callable[[Window], Logits], text: Sequence[Window]
) -> Quality:
    """Both give float32 [n, vocab] for a window of n tokens. Every position is compared, the last too; the text's own
    next token, for the perplexities, is known at all but the last. Sums are float64."""
    divergences: list[NDArray[np.float64]] = []
    own: list[NDArray[np.float64]] = []
    same = 0
    for window in text:
        expected, found = reference(window), model(window)
        same += int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())
        for first in range(0, len(window), _ROWS):
            part = slice(first, first + _ROWS)
            p, q = _log_softmax(expected[part]), _log_softmax(found[part])
            divergences.append((np.exp(p) * (p - q)).sum(axis=1))
            following = window[first + 1 : first + 1 + len(p)]
            rows = np.arange(len(following))
            own.append(np.stack([p[rows, following], q[rows, following]]))
    kl, (before, after) = np.concatenate(divergences), np.concatenate(own, axis=1).mean(axis=1)
    return Quality(
        tokens=len(kl),
        kl=float(kl.mean()),
        kl_99=float(np.quantile(kl, 0.99)),
        top1=same / len(kl),
        perplexity=math.exp(-after),
        reference_perplexity=math.exp(-before),
    )


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found
