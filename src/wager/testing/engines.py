"""An engine with a toy target: the production code path without a model's weights."""

from __future__ import annotations

from collections.abc import Sequence

from wager.constrain.compiler import GrammarCompiler
from wager.draft.base import Drafter
from wager.economics.policy.base import Policy
from wager.economics.policy.heuristics import FixedDepth
from wager.engine.core import Engine
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.kv.blocks import BlockPool
from wager.kv.paged_cache import PagedKVCache
from wager.testing.toy import ToyDistribution, ToyTarget
from wager.trace import Trace
from wager.types import VerifyRule


def toy_engine(
    distribution: ToyDistribution,
    *,
    drafter: Drafter | None = None,
    others: Sequence[Drafter] = (),
    policy: Policy | None = None,
    depth: int = 4,
    rule: VerifyRule = "match",
    num_blocks: int = 64,
    max_rows: int = 64,
    max_prefill_rows: int | None = None,
    max_sequences: int = 8,
    max_context: int = 512,
    prefix_cache: bool = True,
    grammars: GrammarCompiler | None = None,
    trace: Trace | None = None,
) -> Engine:
    """An engine on a ToyTarget. Few `num_blocks` make preemption common, few `max_rows` split prompts into chunks.

    `others` are drafters besides the first. Without a `policy` the first makes `depth` guesses; with one, `depth` is
    the maximum that the policy may plan.
    """
    trace = trace or Trace()
    target = ToyTarget(distribution, num_blocks=num_blocks, max_rows=max_rows, max_sequences=max_sequences)
    scheduler = Scheduler(
        PagedKVCache(BlockPool(num_blocks, prefix_cache=prefix_cache), target.cache),
        max_rows=max_rows,
        max_sequences=max_sequences,
        max_context=max_context,
        max_draft_tokens=depth if drafter else 0,
        clock=trace.clock,
        max_prefill_rows=max_prefill_rows,
    )
    return Engine(
        Runner(target, rule=rule),
        scheduler,
        policy=policy or FixedDepth(depth),
        proposer=Proposer(*([drafter] if drafter else []), *others, vocab=distribution.vocab, rule=rule),
        eos=() if distribution.eos is None else (distribution.eos,),
        grammars=grammars,
        trace=trace,
    )
