"""The composition root: from a configuration to a running engine.

Everything that may be refused (model, tokenizer, drafter, memory) is looked at before the first big allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wager.config import EngineConfig
from wager.draft import parse
from wager.draft.base import Drafter
from wager.draft.model import DraftModel, check_same_vocabulary
from wager.draft.ngram import NgramDrafter
from wager.economics.policy import FixedDepth
from wager.engine import memory
from wager.engine.core import Engine
from wager.engine.drafting import Drafting
from wager.engine.memory import MemoryPlan
from wager.engine.runner import Runner
from wager.engine.scheduler import Scheduler
from wager.errors import UsageError
from wager.kernels import select
from wager.kernels.base import PAGE, Kernels
from wager.kv.pages import PageTable
from wager.models import memory as footprint
from wager.models.opening import open_model
from wager.models.spec import ModelSpec
from wager.models.tokenizer import IncrementalDecoder, Tokenizer
from wager.models.transformer import Decoder
from wager.models.weights import Weights
from wager.trace import Trace
from wager.types import Request

Report = Callable[[str], None]

LENT = ("model", "kernels", "dtype", "threads", "max_rows", "max_sequences", "max_context", "cache_tokens")
"""Options that are decided when a target is loaded."""

AUTO = "ngram"
"""What `--drafter auto` is while nothing weighs drafters against each other: the one that costs no pass."""


@dataclass(frozen=True)
class Shape:
    """Sizes a decoder is built with; `heads` bounds the rows of a pass that want logits."""

    rows: int
    sequences: int
    context: int
    heads: int

    @property
    def pages(self) -> int:
        """Pages of one sequence of full length."""
        return -(-self.context // PAGE)


@dataclass(frozen=True)
class Opened:
    """A model whose files were opened and checked, but not loaded."""

    path: Path
    weights: Weights
    tokenizer: Tokenizer
    shape: Shape

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    def weight_bytes(self, kernels: Kernels) -> int:
        return footprint.weight_bytes(self.spec, kernels)

    def workspace_bytes(self, kernels: Kernels) -> int:
        shape = self.shape
        return footprint.workspace_bytes(
            self.spec,
            kernels,
            max_rows=shape.rows,
            max_sequences=shape.sequences,
            max_pages=shape.pages,
            max_heads=shape.heads,
        )

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position."""
        return footprint.page_bytes(self.spec, kernels) // PAGE

    def load(self, kernels: Kernels, pages: int) -> Decoder:
        shape = self.shape
        return Decoder(
            self.weights,
            kernels,
            pages=pages,
            max_rows=shape.rows,
            max_sequences=shape.sequences,
            max_pages=shape.pages,
            max_heads=shape.heads,
        )


@dataclass
class LoadedTarget:
    """A loaded model that several engines may use in turns; `user` is the one its cache's contents belong to."""

    config: EngineConfig
    opened: Opened
    decoder: Decoder
    kernels: Kernels
    plan: MemoryPlan
    user: LoadedEngine | None = None


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
        return self.drafting.name

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
        self.scheduler.table.forget()
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
    place of the one the configuration names. Raises WagerError subclasses that name what cannot be had.
    """
    config = config or EngineConfig()
    if target is not None:
        _check_lent(config, target.config)
    say = report or (lambda _: None)
    name, argument = ("none", None) if drafter else parse(AUTO if config.drafter == "auto" else config.drafter)
    opened = target.opened if target else _open(config, config.model)
    kernels = target.kernels if target else _kernels(config, opened)
    draft = _open_draft(config, opened, argument) if name == "model" else None
    plan = _plan(config, kernels, opened, draft, lent=target)
    if target is None:
        say(f"loading {opened.path.name} ({memory.gib(plan.weights)})")
        target = LoadedTarget(config, opened, opened.load(kernels, plan.pages), kernels, plan)
    if draft is not None:
        say(f"loading the draft model {draft.path.name}")
    drafter = drafter or _drafter(config, name, argument, target, draft)
    if drafter is not None and drafter.branches and config.verify == "block":
        raise UsageError(
            f"The block rule verifies chains, and drafter {drafter.name!r} makes trees.",
            "Use --verify rejection or match.",
        )
    return _assemble(config, target, drafter, plan)


def _check_lent(config: EngineConfig, lent: EngineConfig) -> None:
    """A lent target is what it is: options that would make it another are refused, not ignored."""
    for name in LENT:
        if getattr(config, name) != getattr(lent, name):
            raise UsageError(
                f"{name} = {getattr(config, name)!r} differs from the lent target's {getattr(lent, name)!r}.",
                "Load the model anew, or leave the option as it was.",
            )


def _kernels(config: EngineConfig, opened: Opened) -> Kernels:
    spec = opened.spec
    latent = (spec.latent.rank, spec.latent.rope) if spec.latent else None
    return select(config.kernels, dtype=config.dtype, threads=config.threads, head_dim=spec.head_dim, latent=latent)


def _open(config: EngineConfig, model: str) -> Opened:
    path, weights, tokenizer = open_model(model)
    context = min(config.max_context or weights.spec.context, weights.spec.context)
    if config.max_context is not None and config.max_context > weights.spec.context:
        raise UsageError(
            f"max_context = {config.max_context} is more than the model's {weights.spec.context} positions.",
            "Leave it out to use all of them.",
        )
    sequences = min(config.max_sequences, config.max_rows)
    return Opened(path, weights, tokenizer, Shape(config.max_rows, sequences, context, heads=config.max_rows))


def _open_draft(config: EngineConfig, target: Opened, model: str | None) -> Opened:
    path, weights, tokenizer = open_model(model or "")
    check_same_vocabulary(target.tokenizer, tokenizer)
    context = min(target.shape.context, weights.spec.context)
    sequences = target.shape.sequences  # one row of each wants logits: the next guess comes out of it
    return Opened(path, weights, tokenizer, Shape(config.max_rows, sequences, context, heads=sequences))


def _plan(
    config: EngineConfig, kernels: Kernels, target: Opened, draft: Opened | None, *, lent: LoadedTarget | None
) -> MemoryPlan:
    """Divide the memory; with a lent target its cache is a given and only the drafter comes on top."""
    budget = config.memory if config.memory is not None else int(memory.available() * memory.SHARE)
    if lent is not None and config.memory is None:
        budget += lent.plan.total
    return memory.plan(
        budget=budget,
        weights=target.weight_bytes(kernels),
        workspace=target.workspace_bytes(kernels),
        drafter=draft.weight_bytes(kernels) + draft.workspace_bytes(kernels) if draft else 0,
        token_bytes=target.token_bytes(kernels) + (draft.token_bytes(kernels) if draft else 0),
        max_context=target.shape.context,
        cache_tokens=lent.plan.cache_tokens if lent else config.cache_tokens,
        full=config.memory is not None,
    )


def _drafter(
    config: EngineConfig, name: str, argument: str | None, target: LoadedTarget, draft: Opened | None
) -> Drafter | None:
    vocab = target.decoder.vocab
    if name == "ngram":
        return NgramDrafter(int(argument)) if argument else NgramDrafter()
    if name == "model" and draft is not None:
        decoder = draft.load(target.kernels, target.plan.pages)
        return DraftModel(
            decoder,
            vocab=vocab,
            max_context=draft.shape.context,
            kernels=target.kernels,
            prefix_cache=config.prefix_cache,
        )
    if name == "adversary":
        from wager.testing import AdversaryDrafter

        return AdversaryDrafter(vocab)
    if name == "random-tree":
        from wager.testing import RandomTreeDrafter

        return RandomTreeDrafter(vocab)
    return None


def _assemble(config: EngineConfig, target: LoadedTarget, drafter: Drafter | None, plan: MemoryPlan) -> LoadedEngine:
    opened, decoder = target.opened, target.decoder
    depth = 0 if drafter is None else drafter.default_depth if config.depth is None else config.depth
    trace = Trace()
    scheduler = Scheduler(
        PageTable(decoder.cache.pages, prefix_cache=config.prefix_cache),
        max_rows=decoder.max_rows,
        max_sequences=decoder.max_sequences,
        max_context=opened.shape.context,
        guesses=depth,
        clock=trace.clock,
    )
    engine = LoadedEngine(
        Runner(decoder, rule=config.verify, kernels=target.kernels),
        scheduler,
        policy=FixedDepth(depth),
        drafting=Drafting(drafter if depth else None, vocab=decoder.vocab, chains=config.verify == "block"),
        decoder=lambda: IncrementalDecoder(opened.tokenizer),
        eos=opened.tokenizer.eos_ids,
        trace=trace,
    )
    engine.target, engine.plan_memory = target, plan
    return engine
