"""Drafters: ways to guess. This page knows their names; `engine.build` constructs them."""

from __future__ import annotations

import difflib

from wager.errors import UsageError

_ARGUMENTS = {
    "none": (0, "", "no speculation"),
    "auto": (0, "", "all drafters that need no weights, as it pays"),
    "ngram": (1, "N", "copies what followed the same tokens before; N: longest match looked up"),
    "model": (2, "PATH", "a smaller model of the same vocabulary"),
    "adversary": (0, "", "always wrong; for proofs"),
    "random-tree": (0, "", "random trees; for proofs"),
}
"""NAME -> (0: no argument, 1: optional, 2: required), what the argument is called, what the drafter does."""


def names() -> dict[str, str]:
    """Every drafter that can be asked for, as it is written on the command line, and what it does."""
    written = {0: "", 1: "[:{}]", 2: ":{}"}
    return {name + written[need].format(what): does for name, (need, what, does) in _ARGUMENTS.items()}


AUTO = ("ngram",)
"""What `auto` stands for."""


def roster(text: str) -> list[tuple[str, str | None]]:
    """Drafters of `NAME[:ARG],...`, none for `none`; raises UsageError as `parse` does, and for one that is named twice
    or beside `none` or `auto`."""
    words = text.split(",")
    parsed = [parse(word.strip()) for word in words]
    for name, _ in parsed:
        if len(parsed) > 1 and name in ("none", "auto"):
            raise UsageError(f"Drafter {name!r} stands beside others in {text!r}.", f"Write {name!r} alone.")
    if len(set(parsed)) < len(parsed):
        raise UsageError(f"A drafter is named twice in {text!r}.", "Name each once.")
    if parsed == [("auto", None)]:
        return [(name, None) for name in AUTO]
    return [each for each in parsed if each[0] != "none"]


def parse(text: str) -> tuple[str, str | None]:
    """Split `NAME[:ARG]`; raises UsageError for an unknown name, a missing or a superfluous argument."""
    name, _, argument = text.partition(":")
    if name not in _ARGUMENTS:
        near = difflib.get_close_matches(name, _ARGUMENTS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known drafters: {', '.join(names())}."
        raise UsageError(f"Unknown drafter {name!r}.", hint)
    need, what, _ = _ARGUMENTS[name]
    if need == 0 and ":" in text:
        raise UsageError(f"Drafter {name!r} takes no argument, but {argument!r} was given.", f"Write {name!r} alone.")
    if need == 2 and not argument:
        raise UsageError(f"Drafter {name!r} needs an argument.", f"Write {name}:{what}.")
    if need == 1 and argument and not argument.isdecimal():
        raise UsageError(f"Drafter {name!r} takes a number, not {argument!r}.", f"Write {name} or {name}:{what}.")
    return name, argument or None
