"""What the name of a model means: a short name of names.toml, or ORG/NAME[:FILE] on the Hugging Face hub; and which
files of a repository are the model.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from wager.errors import ModelError
from wager.inputs import shown

_HUB_NAME = re.compile(
    r"(?:(?:https://)?(?:huggingface\.co|hf\.co)/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?"
)
PART = ".part"
"""Ends the name of a file of the hub that was fetched in part: the next attempt goes on with it."""

_PREFERRED = "q4_k_m"
"""The file that is fetched of a repository with several GGUF files where none is named, as other programs choose."""
MODULES = "mtp-"
"""Begins the name of a file that has modules of multi-token prediction alone."""
_ASSISTANT = r"gemma-?4-e?\d+b(-a\d+b)?(-it)?(-qat.*)?-assistant"
"""In the names of Gemma 4's assistants; other models are called assistants, too."""
_BESIDE = re.compile(rf"(mmproj|{MODULES})|.*(eagle-?3|dflash|dspark|{_ASSISTANT})", re.IGNORECASE)
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A row of names.toml: `gb` is what is fetched, in 10^9 bytes; `drafters` fit the model, the best known first."""

    name: str
    source: str
    gb: float
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the hub. `wanted` is one of its files, or the quantisation in its name; "": the whole model."""

    repository: str
    wanted: str = ""

    def __str__(self) -> str:
        return f"{self.repository}:{self.wanted}" if self.wanted else self.repository


@cache
def named_models() -> Mapping[str, NamedModel]:
    """The table of short names."""
    rows = tomllib.loads(resources.files("wager.models").joinpath("names.toml").read_text(encoding="utf-8"))
    return {
        name: NamedModel(name, row["source"], row["gb"], tuple(row.get("drafters", ()))) for name, row in rows.items()
    }


def named_model(text: str) -> NamedModel | None:
    """The row of a short name or of a source, in capitals or not."""
    wanted = text.lower()
    return named_models().get(wanted) or next(
        (row for row in named_models().values() if row.source.lower() == wanted), None
    )


def hub_source(text: str) -> HubSource | None:
    """What ORG/NAME, ORG/NAME:FILE.gguf, ORG/NAME:QUANTISATION or an address of the hub names; None for anything else,
    such as the path of a GGUF file."""
    found = _HUB_NAME.fullmatch(text)
    if found is None or (not found[2] and text.endswith(".gguf")):
        return None
    return HubSource(found[1], found[2] or "")


def model_files(names: Sequence[str], source: HubSource) -> list[str]:
    """The files of a repository that are the model, of all their `names`: one GGUF file, or all parts of one, or
    weights with what stands beside them. ModelError says what there is instead."""
    root = sorted(name for name in names if "/" not in name)  # folders hold the same in the forms of other programs
    ggufs = [name for name in names if name.endswith(".gguf")]
    models = [name for name in ggufs if not is_beside(_file_name(name))]
    beside = [name for name in ggufs if name not in models and not _file_name(name).startswith("mmproj")]
    if source.wanted:
        named = [name for name in beside if _file_name(name).lower() == source.wanted.lower()]
        return _one_gguf(named or models or beside, source)
    ggufs = models or beside
    weights = [name for name in root if name.endswith(".safetensors")]
    weights = [name for name in weights if not name.startswith("consolidated")] or weights
    if not weights and ggufs:
        return _one_gguf(ggufs, source)
    if not weights:
        pickled = " Its weights are pickles, which may run any code when they are read." if ".bin" in str(root) else ""
        raise ModelError(f"{source} has neither safetensors nor GGUF files.{pickled}", "Give another repository.")
    return weights + [name for name in root if name.endswith((".json", ".jinja"))]


def _one_gguf(names: Sequence[str], source: HubSource) -> list[str]:
    """One GGUF file, or the parts of one, which often stand in a folder of their own."""
    files: dict[str, list[str]] = {}  # by the name before a file was split
    for name in sorted(names, key=lambda name: ("/" in name, name)):
        parts = files.setdefault(_PART_NAME.sub(r"\1\4", _file_name(name)), [])
        if not parts or parts[0].rpartition("/")[0] == name.rpartition("/")[0]:
            parts.append(name)
    wanted = source.wanted.lower()
    exact = [whole for whole in files if wanted in (each.lower() for each in (whole, *map(_file_name, files[whole])))]
    ending = wanted or (_PREFERRED if len(files) > 1 else "")
    found = exact or [whole for whole in files if re.search(rf"(^|[-._]){re.escape(ending)}\.gguf$", whole.lower())]
    found = found if ending else list(files)
    if len(found) != 1:
        what = f"no GGUF file {shown(source.wanted)}" if source.wanted else "no GGUF file that would be chosen"
        listed = ", ".join([*files][:20]) or "none"
        hint = f"Its GGUF files: {listed}. Write {source.repository}:FILE."
        raise ModelError(f"{source.repository} has {what}.", hint)
    return files[found[0]]


def is_beside(name: str) -> bool:
    """Whether a GGUF file of that name goes with a model's: it reads images, or is the head of a drafter."""
    return _BESIDE.match(name) is not None


def _file_name(name: str) -> str:
    """The name without folders."""
    return name.rpartition("/")[2]


def part_names(name: str) -> list[str]:
    """The names of all parts of weights that were cut, of which `name` is one; of others the name alone."""
    part = _PART_NAME.fullmatch(name)
    if part is None:
        return [name]
    return [f"{part[1]}-{number:05d}-of-{part[3]}{part[4]}" for number in range(1, int(part[3]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """`part_names` beside each other, whether they are there or not."""
    return [path.with_name(name) for name in part_names(path.name)]


def is_complete(names: Sequence[str]) -> bool:
    """Whether all parts of weights that were cut are there."""
    return set(names).issuperset(part for name in names for part in part_names(name))
