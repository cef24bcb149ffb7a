"""Builds an engine from a configuration: the target, its drafters, the policy and the latency model.

Model, tokenizer, drafters and memory are checked before the first large allocation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from wager.arch import Mla, ModelSpec
from wager.config import EngineConfig, SpeculationConfig, check_rule_for_trees
from wager.constrain.compiler import GrammarCompiler
from wager.draft.ahead import AheadDrafter, AheadFigures, DraftsAheadLatency
from wager.draft.base import WARM_UP, Drafter
from wager.economics.calibration import FOLDER, Setup, find_calibration, fingerprint, read_quick, write_quick
from wager.economics.latency import LatencyModel
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities, Policy
from wager.economics.policy.heuristics import FixedDepth, Threshold
from wager.economics.surface import MAX_UNCERTAINTY, LatencySurface
from wager.engine.core import Engine
from wager.engine.limits import check_length
from wager.engine.proposer import Proposer
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.engine.wrapped_policies import TenantPolicies
from wager.errors import NumericsError, UsageError
from wager.inputs import expand_path
from wager.kernels._native import BlockPool
from wager.kernels.cpu import Kernels, machine, physical_cores, select
from wager.kv.paged_cache import PagedKVCache
from wager.loading import drafters as drafting
from wager.loading import memory
from wager.loading.memory import MemoryPlan
from wager.loading.opened import OpenedModel, open_target
from wager.models import hub
from wager.models.digests import ModelDigests
from wager.models.opening import tokenizer_fingerprint
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.models.transformer import Decoder
from wager.trace import Trace
from wager.types import NO_TENANT, Request

if TYPE_CHECKING:
    from wager.draft.corpus.learning import LearnedTexts

log = logging.getLogger("wager")

Report = Callable[[str], None]

FIRST_START_S = 0.5
"""Seconds that steps are measured for where they never were, of what one thread computes."""

TARGET_OPTIONS = (
    "model",
    "dtype",
    "kv_dtype",
    "threads",
    "chat_template",
    "max_rows",
    "max_sequences",
    "max_context",
    "cache_tokens",
)
"""Options that are fixed when a target is loaded; engines that share it must have the same values."""


@dataclass
class LoadedTarget:
    """A loaded model that several engines may use one after the other.

    `cache_user` is the engine whose blocks the cache holds now; `latency` the latency model, once it is known.
    """

    config: EngineConfig
    opened: OpenedModel
    decoder: Decoder
    kernels: Kernels
    memory_plan: MemoryPlan
    cache_user: LoadedEngine | None = None
    latency: LatencySurface | None = None

    @cached_property
    def digests(self) -> ModelDigests:
        """What receipts name of it; the first call may take seconds (see ModelDigests.of)."""
        return ModelDigests.of(self.decoder, self.opened.weights, self.opened.tokenizer)

    def claim_cache(self, engine: LoadedEngine | None) -> None:
        """Make `engine` (None: no engine) the cache's user. UsageError while another one has requests running."""
        user = self.cache_user
        if user is not None and user is not engine and user.scheduler.busy:
            raise UsageError(
                "Another engine is using this model's cache.",
                "Wait until its requests have finished: engines that share a model run one at a time.",
            )
        self.cache_user = engine
        self.decoder.tap(engine.proposer.taps if engine else ())


class LoadedEngine(Engine):
    """An engine on a loaded model, with its target and memory plan; `notes` are what a user should know of its
    drafters."""

    target: LoadedTarget
    memory_plan: MemoryPlan
    notes: tuple[str, ...] = ()
    learned: LearnedTexts | None = None
    """What learns from its requests."""

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
        """The drafters in use, separated by commas; `none` while all of them pause since they failed."""
        return self.proposer.name

    @property
    def ahead(self) -> dict[str, AheadFigures]:
        """What each drafter with threads of its own did, by name."""
        drafters = self.proposer.drafters
        return {name: each.figures for name, each in drafters.items() if isinstance(each, AheadDrafter)}

    def step_seconds(self, rows: int, *, requests: int, context: int) -> float:
        """What a step takes by the latency model: of so many rows, of requests with so many cached positions each."""
        surface = _latency(self.target, self.runner, lambda _: None)
        return surface.seconds(rows, requests, requests * context)

    def close(self) -> None:
        """End the threads of drafters that have their own, and what learns. May be repeated; those drafters draft no
        more."""
        for drafter in self.proposer.drafters.values():
            if isinstance(drafter, AheadDrafter):
                drafter.close()
        if self.learned is not None:
            self.learned.close()

    def _add(self, request: Request) -> None:
        """As Engine's. A prediction may be a text. Resets the prefix cache if another engine has used the target's
        cache since."""
        if self.target.cache_user is not self:
            self.target.claim_cache(self)
            self.scheduler.block_pool.reset_prefix_cache()
        prediction = request.params.prediction
        if isinstance(prediction, str):
            tokens = tuple(self.tokenizer.encode(prediction, special=False))
            request = replace(request, params=replace(request.params, prediction=tokens))
        super()._add(request)
        if self.learned is not None:
            self.learned.begin(request)


def load(
    config: EngineConfig | None = None,
    *,
    report: Report | None = None,
    target: LoadedTarget | None = None,
    drafter: Drafter | None = None,
    shared_by: Sequence[EngineConfig] = (),
    expected: Callable[[Tokenizer], Sequence[Request]] | None = None,
) -> LoadedEngine:
    """Build an engine. `report` is called with lines of progress.

    `target` is a loaded model to share instead of loading it again; `drafter` is used in place of those that the
    configuration names; memory is planned for the engines of `shared_by` too, which will share the target; `expected`
    makes requests to come, of which one that is too long is refused before weights are read.
    Raises subclasses of WagerError that name the cause.
    """
    config, report = config or EngineConfig(), report or (lambda _: None)
    if target is not None:
        _check_shared(config, target.config)
    if drafter is not None:
        _check_interface(drafter)
        if drafter.makes_trees:
            check_rule_for_trees(drafter.name, config.speculation.verify)
    model = target.opened if target else open_target(config)
    kernels = target.kernels if target else _select_kernels(config, model)
    opened = [] if drafter else drafting.open_drafters(config, model)
    others = [drafting.open_drafters(each, model) for each in shared_by]
    plan = _plan_memory(config, kernels, model, [opened, *others], shared=target)
    for request in expected(model.tokenizer) if expected else ():
        check_length(request, max_context=model.limits.context, num_blocks=plan.num_blocks)
    with ExitStack() as unless_built:
        learned = _learning(config, model, opened)
        if learned is not None:
            unless_built.callback(learned.close)
            learned.corpus(NO_TENANT)  # is read while the model is
        if target is None:
            report(f"loading {model.path.name} ({memory.gib(plan.weights)}, {model.formats(kernels)})")
            for kind, form in model.matrices(kernels).converted.items():
                report(f"{kind} is read as {form}")
            decoder = model.load(kernels, plan.num_blocks)
            target = LoadedTarget(config, model, decoder, kernels, plan)
        for item in opened:
            for loaded in item.models:
                report(f"loading the {loaded.role} {loaded.path.name}")
        blocks, decoder = target.memory_plan.num_blocks, target.decoder
        pool = BlockPool(
            decoder.cache.num_blocks,
            prefix_cache=config.capacity.prefix_cache,
            states=decoder.num_states,
            snapshots=decoder.num_snapshots,
        )
        build = partial(
            drafting.build,
            config=config,
            decoder=decoder,
            target_pool=pool,
            num_blocks=blocks,
            learned=learned,
        )
        built = [drafter] if drafter else [build(item) for item in opened]
        engine = _assemble(config, target, pool, built, plan=plan, report=report, learned=learned)
        unless_built.pop_all()
    engine.notes = tuple(model.note for item in opened for model in item.models if model.note)
    return engine


def _check_interface(drafter: Drafter) -> None:
    """UsageError unless it has everything that the engine asks of a drafter, whatever its class inherits from."""
    names = [name for name in (*Drafter.__annotations__, *vars(Drafter)) if not name.startswith("_")]
    if missing := [name for name in dict.fromkeys(names) if not hasattr(drafter, name)]:
        raise UsageError(
            f"The drafter of class {type(drafter).__name__} has no {', '.join(missing)}.",
            "Let its class inherit from wager.draft.base.Drafter, which has defaults, or define them.",
        )


def _learning(
    config: EngineConfig, model: OpenedModel, drafters: Sequence[drafting.OpenedDrafter]
) -> LearnedTexts | None:
    """What learns in the folder of the configuration; None if there is none. UsageError if no drafter reads it, or it
    cannot be used."""
    options = config.learning
    if options.learn is None:
        return None
    if config.speculation.depth == 0 or not any(
        spec.option.reads_learned for each in drafters for spec in each.spec.all if not spec.parts
    ):
        raise UsageError(
            f"Nothing reads what is learned in {options.learn}: drafter {config.speculation.drafter!r} looks up no "
            "earlier texts.",
            "Use --drafter auto, suffix or store, or leave out --learn.",
        )
    from wager.draft.corpus.learning import LearnedTexts  # few engines learn

    return LearnedTexts(
        expand_path(str(options.learn)),
        tokenizer_fingerprint(model.tokenizer),
        days=options.learn_days,
        most_bytes=options.learn_bytes,
        prompts=options.learn_prompts,
    )


def _check_shared(config: EngineConfig, shared: EngineConfig) -> None:
    """Options that a shared target cannot honour are refused, not ignored."""
    options, loaded = config.as_options(), shared.as_options()
    for name in TARGET_OPTIONS:
        if options[name] != loaded[name]:
            raise UsageError(
                f"{name} = {options[name]!r} differs from the shared target's {loaded[name]!r}.",
                "Load the model again, or leave the option unchanged.",
            )


def _select_kernels(config: EngineConfig, model: OpenedModel) -> Kernels:
    attention = model.spec.attention
    latent = (attention.kv_rank, attention.rope) if isinstance(attention, Mla) else None
    threads, own = config.model.threads, config.speculation.draft_threads
    if threads is None and own and config.speculation.drafters:  # the drafter's cores are left to it
        threads = max(1, physical_cores() - own)
    return select(threads=threads, head_dim=model.spec.head_dim, latent=latent)


def _plan_memory(
    config: EngineConfig,
    kernels: Kernels,
    target: OpenedModel,
    drafters: Sequence[Sequence[drafting.OpenedDrafter]],
    *,
    shared: LoadedTarget | None,
) -> MemoryPlan:
    """Plan the memory for the largest of several sets of drafters; a shared target keeps its cache, so only the
    drafters are added."""
    limit = config.capacity.memory
    budget, reason = memory.budget(limit=limit, held=shared.memory_plan.total if shared else 0)
    needs = [drafting.footprint(each, kernels) for each in drafters]
    return memory.plan(
        budget=budget,
        weights=target.weight_bytes(kernels),
        workspace=target.workspace_bytes(kernels),
        states=target.states_bytes,
        sequences=target.limits.sequences,
        drafter=max(need.fixed for need in needs),
        token_bytes=target.token_bytes(kernels) + max(need.per_token for need in needs),
        max_context=target.limits.context,
        cache_tokens=shared.memory_plan.cache_tokens if shared else config.capacity.cache_tokens,
        use_all=limit is not None,
        draft_token_bytes=max(need.per_token for need in needs),
        draft_parts=max(needs, key=lambda need: need.fixed).parts,
        reason=reason,
    )


def _latency(target: LoadedTarget, runner: Runner, report: Report) -> LatencySurface:
    """The latency model of a loaded target: a copy for each engine, which corrects it by its own steps. It is the
    calibration of this model on this machine, else its last quick measurement, else one that is made now. A calibration
    that is damaged or outdated is warned of."""
    if target.latency is None:
        model, folder = target.opened, hub.cache_dir(FOLDER)
        current = calibration_setup(
            target.kernels, model.spec, model=model.path.name, dtype=model.formats(target.kernels)
        )
        search = find_calibration(folder, current)
        if search.calibration:
            report(f"step latencies as calibrated {search.calibration.age}")
            target.latency = search.calibration.surface()
        else:
            if any(folder.glob(f"{current.shape}-*.json")):
                log.warning("%s Steps are measured again; `wager calibrate` stores them.", search.reason)
            target.latency = read_quick(folder, current) or _measured_latency(target, runner, current, report)
    return LatencySurface.from_dict(target.latency.as_dict())


def _measured_latency(target: LoadedTarget, runner: Runner, current: Setup, report: Report) -> LatencySurface:
    """A latency model from a few steps of `runner`, which overwrite its cache, stored for the next start; default
    values, with a warning that says why, if that is too small or the model's logits are not finite."""
    from wager.profiling.calibrate import quick_surface  # most starts find a measurement

    target.claim_cache(None)
    report("measuring a few steps")
    try:
        surface = quick_surface(runner, max_context=target.opened.limits.context, seconds=FIRST_START_S)
    except (NumericsError, UsageError) as error:
        log.warning("%s Default step latencies are used until steps were timed.", error.message)
        return LatencySurface([1, 256], [5e-3, 5e-2], uncertainty=MAX_UNCERTAINTY)
    write_quick(hub.cache_dir(FOLDER), current, surface)
    return surface


def calibration_setup(kernels: Kernels, spec: ModelSpec, *, model: str, dtype: str) -> Setup:
    """The setup that a calibration made now is valid for; `model` is the model's name, `dtype` describes the form of
    its weights and cache (OpenedModel.formats)."""
    return Setup(machine(), model, fingerprint(spec), kernels.name, kernels.threads, dtype)


def _assemble(
    config: EngineConfig,
    target: LoadedTarget,
    pool: BlockPool,
    drafters: Sequence[Drafter],
    *,
    plan: MemoryPlan,
    report: Report,
    learned: LearnedTexts | None,
) -> LoadedEngine:
    decoder, model, rule = target.decoder, target.opened, config.speculation.verify
    runner, trace = Runner(decoder, rule=rule, kernels=target.kernels, buffers=decoder.buffers), Trace()
    make_policy, max_depth = build_policies(config.speculation, drafters, lambda: _latency(target, runner, report))
    scheduler = Scheduler(
        PagedKVCache(pool, decoder.cache),
        max_rows=decoder.max_rows,
        max_sequences=decoder.max_sequences,
        max_context=model.limits.context,
        max_draft_tokens=max_depth,
        clock=trace.clock,
        max_prefill_rows=config.capacity.max_prefill_rows,
    )
    engine = LoadedEngine(
        runner,
        scheduler,
        policy=TenantPolicies(make_policy, scheduler.sequences, kept=learned),
        proposer=Proposer(*(drafters if max_depth else ()), vocab=decoder.vocab, rule=rule),
        decoder=lambda prompt: IncrementalDecoder(model.tokenizer, after=prompt),
        eos=model.tokenizer.eos_ids,
        grammars=GrammarCompiler(model.tokenizer),
        trace=trace,
    )
    engine.target, engine.memory_plan, engine.learned = target, plan, learned
    engine.on_deltas = None if learned is None else learned.take  # answers that end are learned
    return engine


_CATCH_UP_TOKENS = 8
"""Missed tokens that a drafter with a cache of its own computes in about the time of one guess."""

_ASSUMED_GUESS_COST = 0.25
"""Assumed cost of a guess until it was timed, as a share of the target's one-row step."""


def build_policies(
    speculation: SpeculationConfig, drafters: Sequence[Drafter], measure: Callable[[], LatencyModel]
) -> tuple[Callable[[], Policy], int]:
    """What makes a policy over `drafters`, once for each tenant, and its maximum number of guesses per sequence and
    step. Policies share a latency model: `measure` returns it, and is called only where it is needed.

    Raises UsageError for options that the policy would ignore.
    """
    spec, depth = speculation.parsed_policy, speculation.depth
    if not drafters or depth == 0:
        return partial(FixedDepth, 0), 0
    speculation.check_policy(len(drafters))
    if spec.kind == "adaptive":
        depths = {drafter.name: drafter.max_depth if depth is None else depth for drafter in drafters}
        measured = measure()
        ahead = {drafter.name: drafter.figures for drafter in drafters if isinstance(drafter, AheadDrafter)}

        def latency() -> LatencyModel:
            """What each policy is given: the length of texts, on which waiting depends, is its own tenant's."""
            return DraftsAheadLatency(measured, ahead) if ahead else measured

        capabilities = {drafter.name: _capabilities(drafter, depths[drafter.name], latency()) for drafter in drafters}
        objective, rule = speculation.parsed_objective, speculation.verify

        def make() -> Adaptive:
            return Adaptive(latency(), drafters=capabilities, objective=objective, rule=rule)

        return make, max(depths.values())
    depth = drafters[0].default_depth if depth is None else depth
    if spec.kind == "threshold":
        make_threshold = partial(Threshold, depth, threshold=spec.threshold, rule=speculation.verify)
        return make_threshold, depth
    return partial(FixedDepth, depth), depth


def _capabilities(drafter: Drafter, depth: int, latency: LatencyModel) -> DrafterCapabilities:
    guess_s = latency.draft_seconds(drafter.name, 1, 1) or _ASSUMED_GUESS_COST * latency.seconds(1, 1, 0)
    weighs = drafter.weighs_prices  # then its first part can draft at once
    catch_up_s = guess_s / _CATCH_UP_TOKENS if drafter.samples and not weighs else 0.0
    warm_up = 0 if drafter.taps is None else 1 if weighs else WARM_UP
    return DrafterCapabilities(
        depth,
        stops_early=drafter.samples and not weighs,
        catch_up_s=catch_up_s,
        warm_up=warm_up,
        weighs_prices=weighs,
    )
