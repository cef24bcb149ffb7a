"""A drafter that runs an assistant (models/head_assistant.py): guesses one after the other, all at the place of the
last known token, from keys and values that the target has cached. It keeps the last state of each sequence, and nothing
else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from wager.draft.base import Drafter
from wager.draft.heads import autoregressive
from wager.draft.heads.one_pass import ParallelDrafter
from wager.draft.heads.sampling import HeadChain
from wager.draft.registry import DrafterParts
from wager.drafter_spec import DrafterSpec
from wager.errors import UsageError
from wager.kernels._native import BlockPool
from wager.kernels.cpu import Kernels
from wager.models.head_assistant import AssistantHead
from wager.types import NO_TENANT, Draft, DraftRequest, SamplingParams, Span
from wager.verify.pack import pack


class AssistantDrafter(ParallelDrafter):
    """Drafts chains with `head`, which reads the target's blocks of each sequence in `blocks`. A sequence is declined
    until the state of its newest verified position has come, and where the target computes known positions again."""

    def __init__(
        self,
        head: AssistantHead,
        blocks: BlockPool,
        *,
        kernels: Kernels | None = None,
        name: str = "mtp",
    ) -> None:
        super().__init__(cast(Any, head), kernels=kernels, name=name)
        self._assistant, self._blocks = head, blocks
        self._last: dict[str, int] = {}  # the last known token of each sequence

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = NO_TENANT) -> None:
        super().begin(seq_id, tokens, params, tenant=tenant)
        self._last[seq_id] = tokens[-1]

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        super().accept(seq_id, tokens)
        if tokens:
            self._last[seq_id] = tokens[-1]

    def end(self, seq_id: str) -> None:
        super().end(seq_id)
        self._last.pop(seq_id, None)

    def _is_ready(self, request: DraftRequest) -> bool:
        return request.computed == request.position - 1 and super()._is_ready(request)

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        chains = []
        for request in requests:
            state, depth = self._states[request.seq_id], min(self.max_depth, request.depth)
            chains.append(HeadChain(request, state.history, depth, temperature=state.temperature))
        states = np.stack([self._states[request.seq_id].state for request in requests])
        active, head, fed = chains, self._assistant, False
        while active:
            spans = []
            for chain in active:
                seq_id, last = chain.request.seq_id, (chain.tokens or [self._last[chain.request.seq_id]])[-1]
                spans.append(Span(seq_id, chain.request.position - 2, (last,), needs_logits=False))
            self._sampler.set_keys(head.guesses, [(chain, len(chain.tokens)) for chain in active])
            output = head.forward(pack(spans, {}, self._blocks, into=head.buffers), states, fed=fed)
            for chain, guess in zip(active, self._sampler.drawn(output, active), strict=True):
                chain.add(guess)
            rows = [row for row, chain in enumerate(active) if not chain.done]
            if output.fed is not None:
                states, fed = output.fed[rows].copy(), True
            active = [active[row] for row in rows]
        return [chain.draft(self.name) for chain in chains]


def build(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    """Of `mtp`: an assistant, or modules."""
    head = parts.loaded_head(spec)
    if not isinstance(head, AssistantHead):
        return autoregressive.build(spec, parts)
    if parts.target_pool is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no blocks of the target's.", "Pass their pool as a part.")
    return AssistantDrafter(head, parts.target_pool, kernels=parts.kernels, name=spec.label)
