"""What a decoder makes of whole texts: the logits after every token, and the experts that every layer chose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.kernels.arrays import Array
from wager.kernels.base import BLOCK_SIZE, TargetOutput
from wager.models.transformer import Decoder
from wager.types import PackedBatch, Span
from wager.verify.pack import pack


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


Choices = NDArray[np.int32]
"""[positions, layers with experts, top_k]: the experts that each position of a text chose."""


def record_choices(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    eos: Collection[int] = (),
    max_context: int,
    report: Callable[[int], None] | None = None,
) -> list[Choices]:
    """The choices of each prompt and of up to `max_tokens` greedy tokens after it, until one of `eos`.

    `decoder` was loaded with `keep_expert_choices`; its cache is overwritten. `report` is called with the number of
    prompts done. UsageError for a model without experts and for a prompt longer than `max_context`.
    """
    if not decoder.expert_choices:
        raise UsageError(
            f"{decoder.spec.name} has no experts whose choice could be recorded.",
            "Give a mixture of experts, such as random:qwen3-moe:300m.",
        )
    recorded = []
    for done, prompt in enumerate(prompts, 1):
        if not 0 < len(prompt) <= max_context:
            raise UsageError(
                f"Prompt {done} has {len(prompt)} tokens; the context holds 1 to {max_context}.",
                "Leave it out, or raise --max-context.",
            )
        last = min(len(prompt) + max_tokens, max_context)
        recorded.append(_choices_of(decoder, list(prompt), length=last, eos=eos))
        if report:
            report(done)
    return recorded


def _choices_of(decoder: Decoder, tokens: list[int], *, length: int, eos: Collection[int]) -> Choices:
    """Choices at the positions of `tokens` and of greedy tokens up to `length` in all."""
    parts, done = [], 0
    while done < len(tokens):
        chunk = tuple(tokens[done : done + decoder.max_rows])
        output = _forward(decoder, chunk, start=done, is_last=done + len(chunk) == len(tokens))
        parts.append(np.stack([ids[: len(chunk)] for ids in decoder.expert_choices], axis=1))
        done += len(chunk)
        if done == len(tokens) < length:
            token = int(output.greedy_tokens[0])
            if token in eos:
                break
            tokens.append(token)
    return np.concatenate(parts)


def _forward(decoder: Decoder, chunk: tuple[int, ...], *, start: int, is_last: bool) -> TargetOutput:
    """One pass over consecutive tokens of the only sequence, in the first blocks of the cache."""
    span = Span("text", start, chunk, needs_logits=is_last)
    return decoder.forward(pack([span], {}, {"text": list(range(decoder.cache.num_blocks))}))
