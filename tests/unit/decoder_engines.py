"""Engines on a small decoder, for drafters that read a target's states."""

from __future__ import annotations

from collections.abc import Sequence

from wager.draft.base import Drafter
from wager.economics.policy.heuristics import FixedDepth
from wager.engine.core import Engine
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.kernels._native import BlockPool
from wager.kernels.base import BLOCK_SIZE
from wager.kernels.cpu import Kernels
from wager.kv.paged_cache import PagedKVCache
from wager.models.transformer import Decoder
from wager.models.weights import Weights
from wager.trace import Trace
from wager.types import Request, SamplingParams, VerifyRule

MAX_CONTEXT = 96


def native() -> Kernels:
    from wager.kernels.cpu import Kernels

    return Kernels(threads=2)


def decoder_on(weights: Weights, kernels: Kernels, *, num_blocks: int = 48, max_rows: int = 48) -> Decoder:
    return Decoder(
        weights,
        kernels,
        num_blocks=num_blocks,
        max_rows=max_rows,
        max_sequences=6,
        max_blocks=MAX_CONTEXT // BLOCK_SIZE,
    )


def engine_on(
    decoder: Decoder,
    *drafters: Drafter,
    depth: int = 4,
    rule: VerifyRule = "match",
    num_blocks: int | None = None,
    max_rows: int | None = None,
    prefix_cache: bool = True,
    snapshots: int | None = None,
    pool: BlockPool | None = None,
) -> Engine:
    """An engine that always drafts to `depth` with the first drafter. Few `num_blocks` make preemption common, few
    `max_rows` split prompts into chunks; `snapshots` of recurrent states (None: as many as the decoder has); `pool` in
    place of a new one."""
    trace = Trace()
    blocks = decoder.cache.num_blocks if num_blocks is None else num_blocks
    states = {"states": decoder.num_states, "snapshots": decoder.num_snapshots if snapshots is None else snapshots}
    scheduler = Scheduler(
        PagedKVCache(pool or BlockPool(blocks, prefix_cache=prefix_cache, **states), decoder.cache),
        max_rows=max_rows or decoder.max_rows,
        max_sequences=decoder.max_sequences,
        max_context=MAX_CONTEXT,
        max_draft_tokens=depth if drafters else 0,
        clock=trace.clock,
    )
    proposer = Proposer(*drafters, vocab=decoder.vocab, rule=rule)
    decoder.tap(proposer.taps)
    runner = Runner(decoder, rule=rule, kernels=decoder.kernels, buffers=decoder.buffers)
    return Engine(runner, scheduler, policy=FixedDepth(depth), proposer=proposer, trace=trace)


def requests(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    return [Request(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)]


def answers(
    engine: Engine, asked: Sequence[Request], *, preempt_every: int = 0, cached: dict[str, int] | None = None
) -> dict[str, list[int]]:
    """The token ids of each request's choices; every sequence is preempted after so many steps, again and again.
    `cached` gets how many tokens of each were found computed."""
    found: dict[str, list[int]] = {}
    for request in asked:
        engine.add(request)
    steps = 0
    while engine.busy:
        for delta in engine.step():
            assert delta.finish_reason in (None, "length", "stop"), delta.error
            found.setdefault(f"{delta.request_id}#{delta.index}", []).extend(delta.token_ids)
            if cached is not None and delta.stats is not None:
                cached[f"{delta.request_id}#{delta.index}"] = delta.stats.cached_tokens
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            engine.preempt_all()
    engine.check()
    return found
