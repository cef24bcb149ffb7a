"""Prompts for measurements: read from a file or built in, grouped by task family.

Two row formats are read: {"id", "category", "prompt"} and Spec-Bench's {"question_id", "category", "turns"}, of which
only the first turn is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from wager.errors import UsageError
from wager.inputs import read_text

FAMILIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's task families with a category of their own; every other category is MT-Bench's."""

OTHER = "mt_bench"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user turn. `id` is that of the file; `family` is one of FAMILIES or OTHER. `category` is that of the file,
    but the family in Spec-Bench's format, whose categories of MT-Bench have few prompts each."""

    id: str | int
    family: str
    text: str
    category: str = field(default="", compare=False)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON-lines file. Raises UsageError that names the file and line of the first bad row."""
    text = read_text(path, "prompt file", "Give a JSON-lines file in UTF-8.")  # whose strings may hold U+2028
    return _parse(text.split("\n"), name=str(path))


def builtin() -> list[Prompt]:
    """The built-in prompts: three of every family."""
    text = files("wager.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _parse(text.split("\n"), name="prompts.jsonl")


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts: as equal a share of each family as possible, spaced evenly within the family."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.family, []).append(index)
    shares = dict.fromkeys(groups, 0)
    while sum(shares.values()) < limit:
        open_families = (family for family in groups if shares[family] < len(groups[family]))
        shares[min(open_families, key=shares.__getitem__)] += 1
    taken = {
        group[step * len(group) // shares[family]] for family, group in groups.items() for step in range(shares[family])
    }
    return [prompt for index, prompt in enumerate(prompts) if index in taken]


def _parse(lines: Iterable[str], *, name: str) -> list[Prompt]:
    prompts = [_row(line, where=f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"{name} holds no prompts.", 'Each line is a row such as {"id", "category", "prompt"}.')
    seen: set[str | int] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UsageError(f"{name} has two prompts with the id {prompt.id!r}.", "Ids must differ.")
        seen.add(prompt.id)
    return prompts


def _row(line: str, *, where: str) -> Prompt:
    hint = 'A row is {"id", "category", "prompt"} or {"question_id", "category", "turns"}.'
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: half a surrogate pair is no text.", "Write valid Unicode.") from error
    except (ValueError, RecursionError) as error:
        cause = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(f"{where}: not JSON ({cause}).", hint) from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not an object.", hint)
    identity = _field(row, ("id", "question_id"), (str, int), where=where, hint=hint)
    category = _field(row, ("category",), (str,), where=where, hint=hint)
    prompt = _field(row, ("prompt", "turns"), (str, list), where=where, hint=hint)
    if isinstance(prompt, list):
        prompt = prompt[0] if prompt else ""
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f"{where}: the prompt is empty or not a text.", hint)
    family = category if category in FAMILIES else OTHER
    return Prompt(identity, family, prompt, family if "turns" in row else category)


def _field(row: Mapping[str, Any], names: Sequence[str], types: tuple[type, ...], *, where: str, hint: str) -> Any:
    for name in names:
        if name in row:
            if isinstance(row[name], types):
                return row[name]
            raise UsageError(f"{where}: {name} = {row[name]!r} has the wrong type.", hint)
    raise UsageError(f"{where}: there is no {' or '.join(names)}.", hint)
