"""The drafter option: NAME[:ARG], drafters of drafters (A+B), one tree of several (A//B), and lists of them.

It imports no drafter: the configuration parses names with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from wager.draft.registry import KINDS, DrafterSpec
from wager.errors import UsageError
from wager.inputs import check_threads, did_you_mean, shown, whole_number

MERGED = "A//B"
"""How one tree of the guesses of several drafters is written."""

WORDS = {
    "none": "no speculation",
    "auto": "store, with the texts that come with wager for the model, or suffix",
}
"""What may be written instead of drafters, alone."""

AUTO = (DrafterSpec("suffix"),)
"""What `auto` stands for, unless a store comes with wager that fits the model: see build/shipped_store.py."""


_READ_ROWS = ("recycle",)
"""Drafters that read the target's rows, also as drafters of drafters."""

DRAFT_DEVICE = "cpu"
"""The only device that draft models run on."""


def descriptions() -> dict[str, str]:
    """What can be written on the command line, and what it does."""
    form = {"none": "", "number": "[:{}]", "modules": "[:[{}][@before|@after]]"} | dict.fromkeys(
        ("path", "head", "store", "layers"), ":{}"
    )
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


def _refuse_head(spec: DrafterSpec, text: str) -> None:
    if spec.name in KINDS and KINDS[spec.name].runs_a_head:
        raise UsageError(
            f"Drafter {spec.name!r} reads the target's states, which a draft model in {text!r} does not have.",
            f"Write {spec} beside it, with a comma or //.",
        )


def _parse_staged(text: str) -> DrafterSpec:
    spec: DrafterSpec | None = None
    for word in reversed(_split(text, "+")):
        outer = _parse_one(word)
        if spec is not None and not (outer.name in KINDS and KINDS[outer.name].takes_inner):
            takers = ", ".join(name for name, kind in KINDS.items() if kind.takes_inner)
            raise UsageError(
                f"Drafter {outer.name!r} takes no drafter of its own, as {text!r} gives it.", f"Such as: {takers}."
            )
        if spec is not None:
            _refuse_head(spec, text)
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
    if expected in ("path", "head", "store", "layers") and not argument:
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


def can_draft_ahead(spec: DrafterSpec) -> bool:
    """Whether it can have threads of its own: it runs a model, and reads nothing of the target."""
    reads_target = any(each.name in _READ_ROWS for each in spec.all)
    return not spec.parts and not reads_target and KINDS[spec.name].argument in ("path", "layers")


def check_draft_threads(drafters: Sequence[DrafterSpec], threads: int, *, device: str | None, rule: str) -> None:
    """UsageError for threads of drafters that cannot have them, or that the machine cannot use, and for a device that
    draft models do not run on. Without drafters threads are for none."""
    if device is not None and device.lower() != DRAFT_DEVICE:
        raise UsageError(
            f"draft_device = {shown(device)} is not possible: draft models run on the CPU here.",
            f"Leave it out, or write {DRAFT_DEVICE}.",
        )
    if not threads:
        if device is not None:
            raise UsageError(
                f"draft_device = {device!r} has no effect without threads for the drafter.",
                "Add --draft-threads N, or leave it out.",
            )
        return
    check_threads(threads, name="draft_threads")
    if drafters and not any(can_draft_ahead(spec) for spec in drafters):
        named = ",".join(map(str, drafters))
        raise UsageError(
            f"draft_threads = {threads} has no effect with drafter {named!r}: only drafters that run a model, and read "
            "nothing of the target, can draft while it verifies.",
            "Leave it out, or use one such as model:PATH, tli:PATH or layers:0-9.",
        )
    if rule != "match":
        raise UsageError(
            f"Drafting while the target verifies (draft_threads = {threads}) is for the rule match, not {rule}.",
            "Use --verify match, or leave out --draft-threads.",
        )
