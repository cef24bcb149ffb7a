"""The drafters of a configuration: models are opened and checked first, and loaded once the memory plan fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wager.config import EngineConfig
from wager.draft.ahead import AheadDrafter
from wager.draft.base import Drafter
from wager.draft.registry import DrafterParts, build_drafter
from wager.draft.store_file import StoreFile, read_store_header
from wager.draft.vocabulary import vocabulary_digest
from wager.drafter_spec import AUTO, DrafterSpec, parse_drafters
from wager.errors import UsageError
from wager.kernels._native import BlockPool
from wager.kernels.cpu import Kernels, select
from wager.loading.opened import OpenedModel, open_draft, open_layers
from wager.models import hub
from wager.models.names import named_model
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.models.transformer import Decoder
from wager.types import RULES

if TYPE_CHECKING:
    from wager.draft.corpus.learning import LearnedTexts
    from wager.loading.heads import OpenedHead


def shipped_store(tokenizer: Tokenizer) -> StoreFile | None:
    """The store that was built for this tokenizer, open; None if there is none. UsageError if it is damaged."""
    digest = ""
    for path in sorted(hub.SHIPPED.glob("*.store")):
        digest = digest or vocabulary_digest(tokenizer)
        if read_store_header(path).tokenizer == digest:
            return StoreFile(path, vocab=num_tokens(tokenizer), tokenizer=digest)
    return None


def known_drafters(model: str) -> tuple[DrafterSpec, ...]:
    """The drafters that are known to fit a model that is given by name, the best first; see models/names.toml."""
    row = named_model(model)
    return tuple(spec for text in (row.drafters if row else ()) for spec in parse_drafters(text))


def is_here(spec: DrafterSpec) -> bool:
    """Whether what one of the known drafters reads is on this machine; what is in the target's own files is."""
    if spec.argument is None:
        return True
    return hub.find(spec.argument) is not None


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A configured drafter that was checked but not built. `label` is its name in results; `model` is its model, opened
    but not loaded, if it runs one, and `head` its head on the target's states; `store` the store that it reads, open;
    `inner` is its own drafter, `parts` are those it joins; `target` is the tokenizer of the verified model."""

    label: str
    spec: DrafterSpec
    model: OpenedModel | None = None
    head: OpenedHead | None = None
    store: StoreFile | None = None
    inner: OpenedDrafter | None = None
    parts: tuple[OpenedDrafter, ...] = ()
    target: Tokenizer | None = None

    @property
    def models(self) -> list[OpenedModel | OpenedHead]:
        """All the models and heads that are loaded for it."""
        own = [model for model in (self.model, self.head) if model is not None]
        below = self.parts if self.inner is None else (self.inner, *self.parts)
        return own + [model for opened in below for model in opened.models]


def open_drafters(config: EngineConfig, target: OpenedModel) -> list[OpenedDrafter]:
    """The drafters of a configuration. The label is the name, with the argument if a name occurs twice."""
    if config.speculation.drafter == "auto":
        return _open_auto(config, target)
    specs = config.speculation.drafters
    counts = Counter(spec.label for spec in specs)
    return [_open(config, target, spec, label=spec.label if counts[spec.label] == 1 else str(spec)) for spec in specs]


def _open_auto(config: EngineConfig, target: OpenedModel) -> list[OpenedDrafter]:
    """A lookup, and beside it the first drafter on this machine that is known to fit the model; a policy that takes one
    drafter takes the latter. The lookup is in the store that comes with wager for this tokenizer, if there is one: for
    trees where rows are cheap, which they are beside weights of 16 bits (docs/drafters_measured.md), and the rule
    verifies trees."""
    paired = next((spec for spec in known_drafters(config.model.model) if is_here(spec)), None)
    found = [] if paired is None else [_open(config, target, paired, label=paired.label)]
    if found and config.speculation.parsed_policy.kind != "adaptive":
        return found
    store = shipped_store(target.tokenizer)
    if store is None:
        return [_open(config, target, spec, label=spec.label) for spec in AUTO] + found
    trees = not target.quantised and RULES[config.speculation.verify].verifies_trees
    spec = DrafterSpec("store", str(store.path), trees)
    return [OpenedDrafter(spec.label, spec, store=store, target=target.tokenizer), *found]


def _open(config: EngineConfig, target: OpenedModel, spec: DrafterSpec, *, label: str) -> OpenedDrafter:
    tokenizer = target.tokenizer
    if spec.parts:
        parts = tuple(_open(config, target, part, label=str(part)) for part in spec.parts)
        return OpenedDrafter(label, spec, parts=parts, target=tokenizer)
    option, argument = spec.option, spec.argument or ""
    model = head = store = None
    if option.argument == "layers":
        model = open_layers(config, target, argument)
    elif option.runs_a_model:
        model = open_draft(config, target, argument, other_vocabulary=option.other_vocabulary)
    elif option.runs_a_head:
        from wager.loading.heads import open_head  # a start without heads does not wait for what they import

        head = open_head(spec, target)
    elif option.argument == "store":
        store = open_store(hub.shipped(argument, "store") or Path(argument), tokenizer)
    if model is not None and model.states_bytes:
        _check_chains(config, spec, model)
    inner = _open(config, target, spec.inner, label=str(spec.inner)) if spec.inner else None
    return OpenedDrafter(label, spec, model, head, store, inner, target=tokenizer)


def _check_chains(config: EngineConfig, spec: DrafterSpec, model: OpenedModel) -> None:
    """UsageError for what a draft model with recurrent layers cannot do: its states follow one text."""
    asked = {
        "guesses a tree": spec.trees,
        "has a drafter of its own": spec.inner is not None,
        "drafts ahead": bool(config.speculation.draft_threads),
        "translates another vocabulary": spec.option.other_vocabulary,
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise UsageError(
            f"{model.path.name} has recurrent layers, and a drafter {str(spec)!r} that {what} needs a model without.",
            "It can draft chains (model:PATH), one after the other.",
        )


def open_store(path: Path, tokenizer: Tokenizer) -> StoreFile:
    """The store in a file. UsageError if there is none, if it is damaged, or if it is of another tokenizer."""
    digest = vocabulary_digest(tokenizer)
    return StoreFile(path.expanduser(), vocab=num_tokens(tokenizer), tokenizer=digest, vocabulary=tokenizer)


@dataclass(frozen=True, slots=True)
class DrafterBytes:
    """Memory of all drafters together: `fixed` bytes, by what is loaded in `parts`, and `per_token` bytes for every
    position of the cache."""

    fixed: int
    per_token: int
    parts: Mapping[str, int]


def footprint(drafters: Sequence[OpenedDrafter], kernels: Kernels) -> DrafterBytes:
    """The memory of all drafters; that of drafters without a model or head is small and not counted."""
    models = [model for drafter in drafters for model in drafter.models]
    parts: Counter[str] = Counter()
    for model in models:
        states = model.states_bytes if isinstance(model, OpenedModel) else 0
        fixed = model.weight_bytes(kernels) + model.workspace_bytes(kernels) + states
        parts[f"{model.role} {model.path.name}"] += fixed
    return DrafterBytes(parts.total(), sum(model.token_bytes(kernels) for model in models), parts)


def build(
    opened: OpenedDrafter,
    config: EngineConfig,
    *,
    decoder: Decoder,
    target_pool: BlockPool,
    num_blocks: int,
    learned: LearnedTexts | None = None,
) -> Drafter:
    """Build one drafter; if it runs a model or a head, load the weights, with a cache of `num_blocks` blocks. One that
    can draft ahead gets the threads that the configuration has for it, one that reads what was `learned` that, and one
    that reads the target's cache which blocks are whose."""
    threads = config.speculation.draft_threads if opened.spec.can_draft_ahead else 0
    kernels = select(threads=threads) if threads else decoder.kernels
    parts = DrafterParts(
        decoder.vocab,
        kernels=kernels,
        prefix_cache=config.capacity.prefix_cache,
        learned=learned,
        target_pool=target_pool,
    )
    drafter = _build(opened, decoder, parts, num_blocks=num_blocks)
    if threads:
        drafter = AheadDrafter(cast(Any, drafter))
    drafter.name = opened.label
    return drafter


def _build(opened: OpenedDrafter, decoder: Decoder, shared: DrafterParts, *, num_blocks: int) -> Drafter:
    """`shared` are the parts that all drafters of a drafter are built from."""

    def part(below: OpenedDrafter, *, behind: bool = False) -> Drafter:
        parts = replace(shared, behind=True) if behind else shared
        return _build(below, decoder, parts, num_blocks=num_blocks)

    if opened.parts:
        from wager.draft.combined import BackedDrafter, MergedDrafter  # few starts need trees

        if opened.spec.backed:
            first, second = opened.parts
            return BackedDrafter(part(first), part(second, behind=True), vocab=decoder.vocab)
        return MergedDrafter([part(each) for each in opened.parts], vocab=decoder.vocab)
    model, head = opened.model, opened.head
    parts = replace(
        shared,
        max_context=model.limits.context if model else None,
        model=model.load(shared.kernels or decoder.kernels, num_blocks) if model else None,
        head=head.load(decoder, num_blocks) if head else None,
        depth=head.depth if head else None,
        store=opened.store,
        inner=part(opened.inner) if opened.inner else None,
        max_logits_rows=model.limits.logits_rows if model else None,
        vocabularies=(opened.target, model.tokenizer) if model and opened.target else None,
    )
    return build_drafter(opened.spec, parts)
