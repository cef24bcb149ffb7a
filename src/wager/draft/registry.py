"""Drafters by name: what the argument of each is, what it does, and how it is built.

To add a drafter, write its file, a factory and an entry in KINDS; nothing else need change.
It imports no drafter: the configuration parses names with it; factories.py imports later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from wager.draft import factories
from wager.draft.spec import DrafterKind as DrafterKind
from wager.draft.spec import DrafterParts as DrafterParts
from wager.draft.spec import DrafterSpec as DrafterSpec
from wager.errors import UsageError
from wager.inputs import did_you_mean, shown, whole_number

if TYPE_CHECKING:
    from wager.draft.base import Drafter


KINDS: Mapping[str, DrafterKind] = {
    "ngram": DrafterKind(
        "copies what followed the same tokens before; N: longest match looked up",
        factories.ngram,
        "number",
        "N",
        (1, 8),
    ),
    "suffix": DrafterKind(
        "what followed most often, in this text and in earlier answers; N: longest match looked up",
        factories.suffix,
        "number",
        "N",
        (1, 24),
    ),
    "store": DrafterKind(
        "what followed most often in the texts that a file was built from", factories.store, "store", "PATH"
    ),
    "model": DrafterKind(
        "a smaller model of the same vocabulary; model:PATH+ngram: another drafter guesses what it will draw",
        factories.model,
        "path",
        "PATH",
        samples=True,
        takes_inner=True,
    ),
    "model-tree": DrafterKind(
        "the same, drafting trees: several candidates where it is in doubt",
        factories.model,
        "path",
        "PATH",
        makes_trees=True,
        samples=True,
    ),
    "layers": DrafterKind(
        "some layers of the model itself: layers:0-9, or layers:0-9.20-29",
        factories.model,
        "layers",
        "FROM-TO",
        samples=True,
        takes_inner=True,
    ),
    "slem": DrafterKind(
        "a model with another vocabulary, whose text is encoded anew",
        factories.text_route,
        "path",
        "PATH",
        other_vocabulary=True,
    ),
    "tli": DrafterKind(
        "a model with another vocabulary, which guesses the tokens that both have",
        factories.intersection,
        "path",
        "PATH",
        samples=True,
        other_vocabulary=True,
    ),
    "adversary": DrafterKind("always wrong; for proofs", factories.adversary),
    "random-tree": DrafterKind("random trees; for proofs", factories.random_tree, makes_trees=True),
}
"""Drafters by name."""

MERGED = "A//B"
"""How one tree of the guesses of several drafters is written."""

WORDS = {"none": "no speculation", "auto": "all drafters that need no weights, as it pays"}
"""What may be written instead of drafters, alone."""

AUTO = (DrafterSpec("ngram"),)
"""What `auto` stands for."""


def descriptions() -> dict[str, str]:
    """What can be written on the command line, and what it does."""
    form = {"none": "", "number": "[:{}]", "path": ":{}", "store": ":{}", "layers": ":{}"}
    kinds = {name + form[kind.argument].format(kind.placeholder): kind.description for name, kind in KINDS.items()}
    return {**WORDS, **kinds, MERGED: "one tree of the guesses of both, such as ngram//model:PATH"}


def parse_drafters(text: str) -> tuple[DrafterSpec, ...]:
    """The drafters of `NAME[:ARG],...`, none for `none`, AUTO for `auto`; A//B and A+B as in DrafterSpec.

    Raises UsageError for an unknown name, a missing or superfluous argument, a drafter that is named twice, and `none`
    or `auto` beside others.
    """
    parsed = [_parse_merged(word.strip()) for word in text.split(",")]
    for spec in parsed:
        if len(parsed) > 1 and spec.name in WORDS:
            raise UsageError(f"Drafter {spec.name!r} stands beside others in {text!r}.", f"Write {spec.name!r} alone.")
    if len(set(parsed)) < len(parsed):
        raise UsageError(f"A drafter is named twice in {text!r}.", "Name each once.")
    if parsed[0].name in WORDS:
        return AUTO if parsed[0].name == "auto" else ()
    return tuple(parsed)


def models_of(spec: DrafterSpec) -> list[str]:
    """Paths of all the models that a drafter, its own drafter and its parts run."""
    return [each.argument or "" for each in spec.all if not each.parts and KINDS[each.name].runs_a_model]


def makes_trees(spec: DrafterSpec) -> bool:
    return bool(spec.parts) or KINDS[spec.name].makes_trees


def _split(text: str, sign: str) -> list[str]:
    """The drafters that `sign` joins: paths may hold it where no drafter's name follows."""
    names = "|".join(sorted(KINDS, key=len, reverse=True))
    return re.split(rf"{re.escape(sign)}(?=(?:{names})(?:[:+,]|//|$))", text)


def _parse_merged(text: str) -> DrafterSpec:
    parts = tuple(_parse_staged(part) for part in _split(text, "//"))
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        if part.name in WORDS:
            raise UsageError(f"Drafter {part.name!r} stands beside others in {text!r}.", f"Write {part.name!r} alone.")
    if len(set(parts)) < len(parts):
        raise UsageError(f"A drafter is named twice in {text!r}.", "Name each once.")
    return DrafterSpec("//".join(map(str, parts)), parts=parts)


def _parse_staged(text: str) -> DrafterSpec:
    spec: DrafterSpec | None = None
    for word in reversed(_split(text, "+")):
        outer = _parse_one(word)
        if spec is not None and not (outer.name in KINDS and KINDS[outer.name].takes_inner):
            takers = ", ".join(name for name, kind in KINDS.items() if kind.takes_inner)
            raise UsageError(
                f"Drafter {outer.name!r} takes no drafter of its own, as {text!r} gives it.", f"Such as: {takers}."
            )
        spec = replace(outer, inner=spec)
    return spec or _parse_one(text)


def _parse_one(text: str) -> DrafterSpec:
    name, colon, argument = text.partition(":")
    if name not in KINDS and name not in WORDS:
        near = did_you_mean(name, [*WORDS, *KINDS], otherwise="")
        raise UsageError(f"Unknown drafter {shown(name)}.", near or f"Known drafters: {', '.join(descriptions())}.")
    kind = KINDS.get(name)
    expected, placeholder = (kind.argument, kind.placeholder) if kind else ("none", "")
    if expected == "none" and colon:
        raise UsageError(f"Drafter {name!r} takes no argument, but {argument!r} was given.", f"Write {name!r} alone.")
    if expected in ("path", "store", "layers") and not argument:
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
    """Build a drafter by name; UsageError for one that is not registered. `merge_drafters` joins several."""
    if spec.name not in KINDS:
        raise UsageError(f"Unknown drafter {spec.name!r}.", f"Known drafters: {', '.join(KINDS)}.")
    return KINDS[spec.name].factory(spec, parts)


def merge_drafters(drafters: Sequence[Drafter], *, vocab: int) -> Drafter:
    """One drafter, of trees of the guesses of several."""
    from wager.draft.merged import MergedDrafter

    return MergedDrafter(drafters, vocab=vocab)
