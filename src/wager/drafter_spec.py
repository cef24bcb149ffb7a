"""The drafter option as users write it: NAME[:tree][:ARG], drafters of drafters (A+B), one tree of several (A//B), one
behind another (A..B), and lists of them.

The names, their arguments and what each may be combined with are in DRAFTERS; draft/registry.py builds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from wager.errors import UsageError
from wager.inputs import check_threads, did_you_mean, shown, whole_number

MERGED_SIGN, BACKED_SIGN = "//", ".."
MERGED, BACKED = f"A{MERGED_SIGN}B", f"A{BACKED_SIGN}B"
"""How one tree of the guesses of several drafters is written, and a drafter that is asked where another is unsure."""

WORDS = {
    "none": "no speculation",
    "auto": "store, with the texts that come with wager for the model, or suffix; beside it a drafter that is known to "
    "fit the model, if it was fetched",
}
"""What may be written instead of drafters, alone."""


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """What may be written of a drafter, and what follows for others.

    module: where in draft/ its `build` is. argument: "none", "number" (optional), "path" (required, of a draft model),
    "head" (required, of a head on the target's states), "modules" (optional, of a head that the target's own files may
    have), "store" (required, the file of a store) or "layers" (required, of the target). placeholder: what the argument
    is called in help. range: least and largest number. trees: whether drafts branch, "optional" where `:tree` asks for
    it. takes_inner: its chains may have a drafter of their own. reads_predictions: guesses may come from
    SamplingParams.prediction. reads_learned: and from what --learn keeps. reads_rows: it reads every row of the
    target's logits. other_vocabulary: its model's tokenizer may be another one.
    """

    module: str
    description: str
    argument: Literal["none", "number", "path", "head", "modules", "store", "layers"] = "none"
    placeholder: str = ""
    range: tuple[int, int] = (0, 0)
    trees: Literal["never", "optional", "always"] = "never"
    takes_inner: bool = False
    reads_predictions: bool = False
    reads_learned: bool = False
    reads_rows: bool = False
    other_vocabulary: bool = False

    @property
    def runs_a_model(self) -> bool:
        return self.argument == "path"

    @property
    def runs_a_head(self) -> bool:
        """Whether it runs something on the target's states."""
        return self.argument in ("head", "modules")

    @property
    def form(self) -> str:
        """What follows the name, as help shows it."""
        argument = {"none": "", "number": f"[:{self.placeholder}]", "modules": "[:[PATH][@before|@after]]"}
        tree = "[:tree]" if self.trees == "optional" else ""
        return tree + argument.get(self.argument, f":{self.placeholder}")


DRAFTERS: Mapping[str, DrafterOption] = {
    "ngram": DrafterOption(
        "ngram", "copies what followed the same tokens before; N: longest match looked up", "number", "N", (1, 8)
    ),
    "suffix": DrafterOption(
        "lookup",
        "what followed most often, in this text and in earlier answers; N: longest match looked up",
        "number",
        "N",
        (1, 24),
        trees="optional",
        reads_predictions=True,
        reads_learned=True,
    ),
    "store": DrafterOption(
        "lookup",
        "as suffix, and what followed most often in texts of the target, from a file",
        "store",
        "PATH",
        trees="optional",
        reads_predictions=True,
        reads_learned=True,
    ),
    "recycle": DrafterOption(
        "recycling", "trees of what the target last found likeliest after each token", trees="always", reads_rows=True
    ),
    "prediction": DrafterOption(
        "prediction", "the output that the request predicts (--prediction)", reads_predictions=True
    ),
    "model": DrafterOption(
        "model",
        "a smaller model of the same vocabulary; model:PATH+ngram: another drafter guesses what it will draw",
        "path",
        "PATH",
        trees="optional",
        takes_inner=True,
    ),
    "layers": DrafterOption(
        "model",
        "some layers of the model itself, such as 0-9 or 0-9.20-29",
        "layers",
        "FROM-TO",
        trees="optional",
        takes_inner=True,
    ),
    "slem": DrafterOption(
        "other_vocabulary", "a model of another vocabulary, by way of text", "path", "PATH", other_vocabulary=True
    ),
    "tli": DrafterOption(
        "other_vocabulary",
        "a model of another vocabulary, by the tokens that both have",
        "path",
        "PATH",
        other_vocabulary=True,
    ),
    "eagle3": DrafterOption(
        "heads.autoregressive", "an EAGLE-3 head on the target's states", "head", "PATH", trees="optional"
    ),
    "mtp": DrafterOption(
        "heads.assistant",
        "modules of multi-token prediction, the model's own, also in a GGUF file beside it, or those in PATH, on its "
        "states before or after its last norm; Gemma 4's assistants",
        "modules",
        "PATH",
        trees="optional",
    ),
    "medusa": DrafterOption("heads.one_pass", "Medusa heads on the target's states", "head", "PATH", trees="optional"),
    "dflash": DrafterOption(
        "heads.one_pass", "a block head, DFlash or DSpark, on the target's states", "head", "PATH", trees="optional"
    ),
}
"""Drafters by name."""


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed drafter option: `NAME[:tree][:ARG]`, with `+INNER` behind it the drafter of the drafter, `A//B`: the
    `parts` of which one tree is made, or `A..B` (`backed`), where the first of two parts is asked for every draft."""

    name: str
    argument: str | None = None
    trees: bool = False
    inner: DrafterSpec | None = None
    parts: tuple[DrafterSpec, ...] = ()
    backed: bool = False

    def __str__(self) -> str:
        own = self.label if self.argument is None else f"{self.label}:{self.argument}"
        return own if self.inner is None else f"{own}+{self.inner}"

    @property
    def label(self) -> str:
        """What results call it: the name, without the argument."""
        return f"{self.name}:tree" if self.trees else self.name

    @property
    def option(self) -> DrafterOption:
        """The options of a drafter that has no parts."""
        return DRAFTERS[self.name]

    @property
    def all(self) -> tuple[DrafterSpec, ...]:
        """This drafter, its own drafter or its parts, theirs, and so on."""
        below = self.parts if self.inner is None else (self.inner, *self.parts)
        return (self, *(each for spec in below for each in spec.all))

    @property
    def models(self) -> list[str]:
        """Paths of all the models that it runs."""
        return [spec.argument or "" for spec in self.all if not spec.parts and spec.option.runs_a_model]

    @property
    def path_and_side(self) -> tuple[str, str | None]:
        """Where its files are, "" for the target's own, and on which side of the target's last norm modules read its
        states, if that is said: before or after."""
        path, _, side = (self.argument or "").rpartition("@")
        sided = self.option.argument == "modules" and side in ("before", "after")
        return (path, side) if sided else (self.argument or "", None)

    @property
    def makes_trees(self) -> bool:
        return bool(self.parts) or self.trees or self.option.trees == "always"

    @property
    def reads_texts_alone(self) -> bool:
        """Whether it needs neither a model nor the target's outputs."""
        kinds = ("none", "number", "store")
        return all(not each.parts and each.option.argument in kinds and not each.option.reads_rows for each in self.all)

    @property
    def can_draft_ahead(self) -> bool:
        """Whether it can have threads of its own: it runs a model, and reads nothing of the target."""
        if self.parts or self.option.argument not in ("path", "layers"):
            return False
        return not any(spec.option.reads_rows for spec in self.all)


AUTO = (DrafterSpec("suffix"),)
"""What `auto` stands for where nothing else is known to fit the model: see loading/drafters.py."""


def descriptions() -> dict[str, str]:
    """What can be written on the command line, and what it does."""
    kinds = {name + option.form: option.description for name, option in DRAFTERS.items()}
    return {
        **WORDS,
        **kinds,
        ":tree": "drafts are trees, several candidates where it is in doubt, such as model:tree:PATH",
        MERGED: "one tree of the guesses of both, such as ngram//model:PATH",
        BACKED: "the guesses of A, and those of B too where that pays, such as suffix..eagle3:PATH",
    }


def parse_drafters(text: str) -> tuple[DrafterSpec, ...]:
    """The drafters of `NAME[:tree][:ARG],...`, none for `none`, AUTO for `auto`; A//B, A..B and A+B as in DrafterSpec.

    Raises UsageError for an unknown name, a missing or superfluous argument, a drafter that is named twice, and `none`
    or `auto` beside others.
    """
    parsed = tuple(_parse_joined(word.strip()) for word in text.split(","))
    _check_beside_others(parsed, text)
    if parsed[0].name in WORDS:
        return AUTO if parsed[0].name == "auto" else ()
    return parsed


def _check_beside_others(specs: Sequence[DrafterSpec], text: str) -> None:
    for spec in specs:
        if len(specs) > 1 and spec.name in WORDS:
            raise UsageError(f"Drafter {spec.name!r} stands beside others in {text!r}.", f"Write {spec.name!r} alone.")
    if len(set(specs)) < len(specs):
        raise UsageError(f"A drafter is named twice in {text!r}.", "Name each once.")


def _split(text: str, sign: str) -> list[str]:
    """The drafters that `sign` joins: paths may hold it where no drafter's name follows."""
    return re.split(rf"{re.escape(sign)}(?=(?:{'|'.join(DRAFTERS)})(?:-tree)?(?:[:+,]|//|\.\.|$))", text)


def _parse_joined(text: str) -> DrafterSpec:
    """`A//B..C//D` is A//B with C//D behind it."""
    parts = tuple(_parse_merged(part) for part in _split(text, BACKED_SIGN))
    if len(parts) == 1:
        return parts[0]
    _check_beside_others(parts, text)
    if len(parts) > 2:
        raise UsageError(f"{text!r} joins {len(parts)} drafters by {BACKED_SIGN}.", f"It joins two: {BACKED}.")
    return DrafterSpec(BACKED_SIGN.join(map(str, parts)), parts=parts, backed=True)


def _parse_merged(text: str) -> DrafterSpec:
    parts = tuple(_parse_staged(part) for part in _split(text, MERGED_SIGN))
    if len(parts) == 1:
        return parts[0]
    _check_beside_others(parts, text)
    return DrafterSpec(MERGED_SIGN.join(map(str, parts)), parts=parts)


def _parse_staged(text: str) -> DrafterSpec:
    *outer, innermost = map(_parse_one, _split(text, "+"))
    spec = innermost
    for each in reversed(outer):
        if each.name in WORDS or each.trees or not each.option.takes_inner:
            takers = ", ".join(name for name, option in DRAFTERS.items() if option.takes_inner)
            raise UsageError(
                f"Drafter {each.label!r} takes no drafter of its own, as {text!r} gives it.", f"Such as: {takers}."
            )
        if spec.name not in WORDS and spec.option.runs_a_head:
            raise UsageError(
                f"Drafter {spec.label!r} reads the target's states, which a draft model in {text!r} does not have.",
                f"Write {spec} beside it, with a comma or //.",
            )
        spec = replace(each, inner=spec)
    return spec


def _parse_one(text: str) -> DrafterSpec:
    text = re.sub(r"^(\w+)-tree(?=:|$)", r"\1:tree", text)  # as it was written before there was a modifier
    name, colon, argument = text.partition(":")
    option = DRAFTERS.get(name)
    if option is None and name not in WORDS:
        near = did_you_mean(name, [*WORDS, *DRAFTERS], otherwise="")
        raise UsageError(f"Unknown drafter {shown(name)}.", near or f"Known drafters: {', '.join(descriptions())}.")
    expected = option.argument if option else "none"
    trees = option is not None and option.trees == "optional" and argument.partition(":")[0] == "tree"
    if trees:
        _, colon, argument = argument.partition(":")
    spec = DrafterSpec(name, argument or None, trees)
    if expected == "none" and colon:
        raise UsageError(f"Drafter {name!r} takes no argument, but {argument!r} was given.", f"Write {name!r} alone.")
    if option is None:
        return spec
    if expected in ("path", "head", "store", "layers") and not argument:
        raise UsageError(f"Drafter {spec.label!r} needs an argument.", f"Write {spec.label}:{option.placeholder}.")
    if argument and expected == "number":
        number = whole_number(argument)
        least, most = option.range
        if number is None:
            raise UsageError(
                f"Drafter {name!r} takes a number, not {shown(argument)}.",
                f"Write {name} or {name}:{option.placeholder}.",
            )
        if not least <= number <= most:
            raise UsageError(f"{text} is out of range.", f"{option.placeholder} must be from {least} to {most}.")
    return spec


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """The layers of `0-9.20-29`, from 0, ascending; `count` is how many the model has. UsageError for a text that is
    not such, layers that the model does not have, and all of its layers."""
    layers: list[int] = []
    for part in text.split("."):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if not match:
            raise UsageError(f"Layers {shown(text)} cannot be read.", "Write 0-9, or 0-9.20-29.")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or (layers and first <= layers[-1]):
            raise UsageError(f"Layers {shown(text)} are not in ascending order.", "Write 0-9.20-29.")
        if last >= count:
            raise UsageError(
                f"Layer {last} of {shown(text)} does not exist.", f"The model has layers 0 to {count - 1}."
            )
        layers += range(first, last + 1)
    if len(layers) == count:
        raise UsageError(f"Layers {shown(text)} are all that the model has.", "Leave some out: guesses must cost less.")
    return tuple(layers)


def check_draft_threads(drafters: Sequence[DrafterSpec], threads: int, *, rule: str) -> None:
    """UsageError for threads of drafters that cannot have them, or that the machine cannot use. Without drafters
    threads are for none."""
    if not threads:
        return
    check_threads(threads, name="draft_threads")
    if drafters and not any(spec.can_draft_ahead for spec in drafters):
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
