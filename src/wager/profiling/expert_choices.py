"""Runs texts through a mixture of experts and records which experts every layer chose at every position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from wager.errors import UsageError
from wager.kernels.base import TargetOutput
from wager.models.transformer import Decoder
from wager.types import Span
from wager.verify.pack import pack

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
    return decoder.forward(pack([span], {}, {"text": range(decoder.cache.num_blocks)}))
