"""Drafters by name: what the argument of each is, what it does, and how it is built.

To add a drafter, write its file and add an entry to KINDS; a model family, a command or the engine need no change.
It imports no drafter: the configuration parses names with it; factories import later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from wager.errors import UsageError
from wager.inputs import did_you_mean, shown, whole_number

if TYPE_CHECKING:
    from wager.draft.base import Drafter
    from wager.draft.store_file import StoreFile
    from wager.kernels.base import Kernels, Target


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed drafter option, `NAME[:ARG]`."""

    name: str
    argument: str | None = None

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument}"


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What a factory may build from: the verified model's number of logits `vocab`, the positions of a sequence
    `max_context`; for a drafter that runs a model, that model, loaded, and the kernels it samples with; for one that
    reads a store, the store, open."""

    vocab: int
    max_context: int | None = None
    model: Target | None = None
    kernels: Kernels | None = None
    prefix_cache: bool = True
    store: StoreFile | None = None


Factory = Callable[[DrafterSpec, DrafterParts], "Drafter"]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A name in the registry.

    argument: what may follow the name: "none", "number" (optional), "path" (required, of the draft model that is
    loaded for it) or "store" (required, the file of a store). placeholder: what the argument is called in help. range:
    least and largest number. makes_trees: drafts may branch. samples: guesses are draws from a distribution, not
    certain. reads_predictions: guesses may come from SamplingParams.prediction.
    """

    description: str
    factory: Factory
    argument: Literal["none", "number", "path", "store"] = "none"
    placeholder: str = ""
    range: tuple[int, int] = (0, 0)
    makes_trees: bool = False
    samples: bool = False
    reads_predictions: bool = False

    @property
    def runs_a_model(self) -> bool:
        return self.argument == "path"


def _ngram(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.ngram import NgramDrafter

    return NgramDrafter(int(spec.argument)) if spec.argument else NgramDrafter()


def _suffix(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.lookup import LookupDrafter
    from wager.draft.lookup_rates import DEFAULT_LONGEST, SHARED_TOKENS, LookupSources

    longest = int(spec.argument) if spec.argument else DEFAULT_LONGEST
    return LookupDrafter(spec.name, LookupSources(longest, SHARED_TOKENS))


def _store(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.lookup import LookupDrafter
    from wager.draft.lookup_rates import DEFAULT_LONGEST, SHARED_TOKENS, LookupSources

    if parts.store is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no open store.", "Open it and pass it as a part.")
    return LookupDrafter(spec.name, LookupSources(DEFAULT_LONGEST, SHARED_TOKENS, parts.store))


def _prediction(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.prediction import PredictionDrafter

    return PredictionDrafter()


def _model(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.model import DraftModel

    if parts.model is None:
        raise UsageError(f"Drafter {str(spec)!r} was given no loaded model.", "Load the model and pass it as a part.")
    return DraftModel(
        parts.model,
        vocab=parts.vocab,
        max_context=parts.max_context,
        kernels=parts.kernels,
        prefix_cache=parts.prefix_cache,
    )


def _adversary(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.adversary import AdversaryDrafter

    return AdversaryDrafter(parts.vocab)


def _random_tree(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    from wager.draft.random_tree import RandomTreeDrafter

    return RandomTreeDrafter(parts.vocab)


KINDS: Mapping[str, DrafterKind] = {
    "ngram": DrafterKind(
        "copies what followed the same tokens before; N: longest match looked up", _ngram, "number", "N", (1, 8)
    ),
    "suffix": DrafterKind(
        "what followed most often, in this text and in earlier answers; N: longest match looked up",
        _suffix,
        "number",
        "N",
        (1, 24),
        reads_predictions=True,
    ),
    "store": DrafterKind(
        "as suffix, and what followed most often in texts of the target, from a file",
        _store,
        "store",
        "PATH",
        reads_predictions=True,
    ),
    "prediction": DrafterKind(
        "the output that the request predicts (--prediction)", _prediction, reads_predictions=True
    ),
    "model": DrafterKind("a smaller model of the same vocabulary", _model, "path", "PATH", samples=True),
    "adversary": DrafterKind("always wrong; for proofs", _adversary),
    "random-tree": DrafterKind("random trees; for proofs", _random_tree, makes_trees=True),
}
"""Drafters by name."""

WORDS = {"none": "no speculation", "auto": "all drafters that need no weights, as it pays"}
"""What may be written instead of drafters, alone."""

AUTO = (DrafterSpec("ngram"),)
"""What `auto` stands for."""


def descriptions() -> dict[str, str]:
    """What can be written on the command line, and what it does."""
    form = {"none": "", "number": "[:{}]", "path": ":{}", "store": ":{}"}
    kinds = {name + form[kind.argument].format(kind.placeholder): kind.description for name, kind in KINDS.items()}
    return {**WORDS, **kinds}


def parse_drafters(text: str) -> tuple[DrafterSpec, ...]:
    """The drafters of `NAME[:ARG],...`, none for `none`, AUTO for `auto`.

    Raises UsageError for an unknown name, a missing or superfluous argument, a drafter that is named twice, and `none`
    or `auto` beside others.
    """
    parsed = [_parse_one(word.strip()) for word in text.split(",")]
    for spec in parsed:
        if len(parsed) > 1 and spec.name in WORDS:
            raise UsageError(f"Drafter {spec.name!r} stands beside others in {text!r}.", f"Write {spec.name!r} alone.")
    if len(set(parsed)) < len(parsed):
        raise UsageError(f"A drafter is named twice in {text!r}.", "Name each once.")
    if parsed[0].name in WORDS:
        return AUTO if parsed[0].name == "auto" else ()
    return tuple(parsed)


def _parse_one(text: str) -> DrafterSpec:
    name, colon, argument = text.partition(":")
    if name not in KINDS and name not in WORDS:
        near = did_you_mean(name, [*WORDS, *KINDS], otherwise="")
        raise UsageError(f"Unknown drafter {shown(name)}.", near or f"Known drafters: {', '.join(descriptions())}.")
    kind = KINDS.get(name)
    expected, placeholder = (kind.argument, kind.placeholder) if kind else ("none", "")
    if expected == "none" and colon:
        raise UsageError(f"Drafter {name!r} takes no argument, but {argument!r} was given.", f"Write {name!r} alone.")
    if expected in ("path", "store") and not argument:
        raise UsageError(f"Drafter {name!r} needs an argument.", f"Write {name}:{placeholder}.")
    if argument and kind and expected == "number":
        number, (least, most) = whole_number(argument), kind.range
        if number is None:
            raise UsageError(
                f"Drafter {name!r} takes a number, not {shown(argument)}.", f"Write {name} or {name}:{placeholder}."
            )
        if not least <= number <= most:
            raise UsageError(f"{text} is out of range.", f"{placeholder} must be from {least} to {most}.")
    return DrafterSpec(name, argument or None)


def build_drafter(spec: DrafterSpec, parts: DrafterParts) -> Drafter:
    """Build a drafter by name; UsageError for one that is not registered."""
    if spec.name not in KINDS:
        raise UsageError(f"Unknown drafter {spec.name!r}.", f"Known drafters: {', '.join(KINDS)}.")
    return KINDS[spec.name].factory(spec, parts)
