"""The composition root: from a configuration to a running engine.

Everything that may be refused (model, tokenizer, drafter, memory) is looked at before the first big allocation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wager.arch import Mla, ModelSpec
from wager.build import drafters
from wager.build import memory_plan as memory
from wager.build import policy as betting
from wager.build.drafters import Named
from wager.build.memory_plan import MemoryPlan
from wager.build.opened import OpenedModel, open_target
from wager.config import EngineConfig
from wager.draft.base import Drafter
from wager.economics.latency.calibration import FOLDER, find_calibration
from wager.economics.latency.surface import LatencySurface
from wager.engine.core import Engine
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.errors import UsageError
from wager.kernels import select
from wager.kernels.base import Kernels
from wager.kv.blocks import BlockPool
from wager.kv.paged_cache import PagedKVCache
from wager.models import hub
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.models.transformer import Decoder
from wager.profiling.calibrate import quick_surface, setup
from wager.trace import Trace
from wager.types import Request

log = logging.getLogger("wager")

Report = Callable[[str], None]

LENT = ("model", "kernels", "dtype", "threads", "max_rows", "max_sequences", "max_context", "cache_tokens")
"""Options that are decided when a target is loaded."""


@dataclass
class LoadedTarget:
    """A loaded model that several engines may use in turns; `user` is the one its cache's contents belong to."""

    config: EngineConfig
    opened: OpenedModel
    decoder: Decoder
    kernels: Kernels
    plan: MemoryPlan
    user: LoadedEngine | None = None
    surface: LatencySurface | None = None


class LoadedEngine(Engine):
    """An engine over a loaded model, with what was decided when it was built."""

    target: LoadedTarget
    plan_memory: MemoryPlan

    @property
    def tokenizer(self) -> Tokenizer:
        return self.target.opened.tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self.target.opened.spec

    @property
    def kernels(self) -> Kernels:
        return self.target.kernels

    @property
    def drafter_name(self) -> str:
        """Who guesses now; `none` once a failing drafter was switched off."""
        return self.proposer.name

    def add(self, request: Request) -> None:
        self._take_turn()
        super().add(request)

    def _take_turn(self) -> None:
        """Make the target's cache ours; what others left in it is not what our page table says."""
        user = self.target.user
        if user is self:
            return
        if user is not None and user.busy:
            raise UsageError(
                "Another engine is using this model's cache.", "Let it finish: engines that share a model take turns."
            )
        self.scheduler.block_pool.reset_prefix_cache()
        self.target.user = self


def load(
    config: EngineConfig | None = None,
    *,
    report: Report | None = None,
    target: LoadedTarget | None = None,
    drafter: Drafter | None = None,
) -> LoadedEngine:
    """Build an engine. `report` is told what is going on.

    `target` lends a loaded model instead of loading it again; `drafter` is a ready drafter of the caller's own, used in
    place of those that the configuration names. Raises WagerError subclasses that name what cannot be had.
    """
    config = config or EngineConfig()
    if target is not None:
        _check_lent(config, target.config)
    say = report or (lambda _: None)
    opened = target.opened if target else open_target(config)
    kernels = target.kernels if target else _kernels(config, opened)
    named = [] if drafter else drafters.name_all(config, opened)
    plan = _plan(config, kernels, opened, named, lent=target)
    if target is None:
        say(f"loading {opened.path.name} ({memory.gib(plan.weights)})")
        target = LoadedTarget(config, opened, opened.load(kernels, plan.num_blocks), kernels, plan)
    pages, vocab = target.plan.num_blocks, target.decoder.vocab
    for each in named:
        if each.opened is not None:
            say(f"loading the draft model {each.opened.path.name}")
    made = [drafters.make(each, config, kernels=kernels, num_blocks=pages, vocab=vocab) for each in named]
    return _assemble(config, target, [drafter] if drafter else made, plan, say=say)


def _check_lent(config: EngineConfig, lent: EngineConfig) -> None:
    """A lent target is what it is: options that would make it another are refused, not ignored."""
    for name in LENT:
        if getattr(config, name) != getattr(lent, name):
            raise UsageError(
                f"{name} = {getattr(config, name)!r} differs from the lent target's {getattr(lent, name)!r}.",
                "Load the model anew, or leave the option as it was.",
            )


def _kernels(config: EngineConfig, opened: OpenedModel) -> Kernels:
    attention = opened.spec.attention
    latent = (attention.kv_rank, attention.rope) if isinstance(attention, Mla) else None
    return select(
        config.kernels, dtype=config.dtype, threads=config.threads, head_dim=attention.head_dim, latent=latent
    )


def _plan(
    config: EngineConfig, kernels: Kernels, target: OpenedModel, named: Sequence[Named], *, lent: LoadedTarget | None
) -> MemoryPlan:
    """Divide the memory; with a lent target its cache is a given and only the drafters come on top."""
    budget = config.memory if config.memory is not None else int(memory.available() * memory.SHARE)
    if lent is not None and config.memory is None:
        budget += lent.plan.total
    resting, per_token = drafters.footprint(named, kernels)
    return memory.plan(
        budget=budget,
        weights=target.weight_bytes(kernels),
        workspace=target.workspace_bytes(kernels),
        drafter=resting,
        token_bytes=target.token_bytes(kernels) + per_token,
        max_context=target.limits.context,
        cache_tokens=lent.plan.cache_tokens if lent else config.cache_tokens,
        full=config.memory is not None,
    )


def _prices(config: EngineConfig, target: LoadedTarget, say: Report) -> LatencySurface:
    """What steps of a loaded target take: as calibrated, or else measured in a moment; every engine learns on from
    there by itself."""
    if target.surface is None:
        target.surface = _calibrated(target, say) or _measured(config, target, say)
    return LatencySurface.from_dict(target.surface.as_dict())


def _calibrated(target: LoadedTarget, say: Report) -> LatencySurface | None:
    folder = hub.cache_dir(FOLDER)
    here = setup(target.kernels, target.opened.spec, model=target.opened.path.name)
    found, why = find_calibration(folder, here)
    if found:
        say(f"prices as calibrated {found.age}")
        return found.surface()
    if any(folder.glob(f"{here.shape}-*.json")):  # there is one, but it is damaged or of another machine
        log.warning("%s Steps are measured anew; `wager calibrate` stores them.", why)
    return None


def _measured(config: EngineConfig, target: LoadedTarget, say: Report) -> LatencySurface:
    """A moment's measuring overwrites the cache, so whoever used it must forget what it held."""
    if target.user is not None and target.user.busy:
        raise UsageError("Another engine is using this model's cache.", "Load all engines before the first is busy.")
    say("measuring a few steps")
    runner = Runner(target.decoder, rule=config.verify, kernels=target.kernels)
    target.user = None
    try:
        return quick_surface(runner, max_context=target.opened.limits.context)
    except UsageError as error:  # a cache of a few pages: begin with a guess, the steps will correct it
        log.warning("%s Prices begin as a guess.", error.message)
        return LatencySurface([1, 256], [5e-3, 5e-2])


def _assemble(
    config: EngineConfig, target: LoadedTarget, guessers: Sequence[Drafter], plan: MemoryPlan, *, say: Report
) -> LoadedEngine:
    opened, decoder = target.opened, target.decoder
    policy, depth = betting.build(config, guessers, lambda: _prices(config, target, say))
    trace = Trace()
    scheduler = Scheduler(
        PagedKVCache(BlockPool(decoder.cache.num_blocks, prefix_cache=config.prefix_cache), decoder.cache),
        max_rows=decoder.max_rows,
        max_sequences=decoder.max_sequences,
        max_context=opened.limits.context,
        max_draft_tokens=depth,
        clock=trace.clock,
    )
    engine = LoadedEngine(
        Runner(decoder, rule=config.verify, kernels=target.kernels),
        scheduler,
        policy=policy,
        proposer=Proposer(*(guessers if depth else ()), vocab=decoder.vocab, rule=config.verify),
        decoder=lambda: IncrementalDecoder(opened.tokenizer),
        eos=opened.tokenizer.eos_ids,
        trace=trace,
    )
    engine.target, engine.plan_memory = target, plan
    return engine
