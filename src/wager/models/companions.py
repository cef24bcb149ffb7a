"""Drafters that a model's files bring along: modules of multi-token prediction in the files themselves, and GGUF files
of heads beside a model's own, as publishers of GGUF models lay them; and what tells any drafter's files from another's.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from wager.arch.gguf_config import HEADS, read_further_layers
from wager.drafter_spec import DrafterSpec
from wager.errors import ModelError
from wager.models import hub
from wager.models.gguf import open_gguf
from wager.models.head_mtp import FORMATS
from wager.models.names import MODULES, is_beside, part_names, part_paths
from wager.models.opening import open_model, target_fingerprint
from wager.models.safetensors_files import SafetensorsSource

log = logging.getLogger("wager")

_QUANTISATION = re.compile(r"[-._](UD-)?(I?Q\d\w*|TQ\d\w*|(MX|NV)FP4\w*|BF16|F16|F32)$", re.IGNORECASE)


def companion_modules(model: Path) -> Path | None:
    """The file of MTP modules beside a model's GGUF file (`mtp-NAME.gguf`) that has none itself; None if there is none.
    Of several quantisations it is the model's own, else the smallest. ModelError if only files of other names are
    there, beside several models."""
    if model.suffix != ".gguf" or not model.is_file() or has_modules(model):
        return None
    found = [path for path in _beside(model) if path.name.lower().startswith(MODULES)]
    own = _of_that_name(model, found)
    if found and not own:
        raise ModelError(
            f"{model.name} has no MTP weights, and of the files beside it none has its name: "
            f"{', '.join(path.name for path in found)}.",
            "Write the one that belongs to it: --drafter mtp:PATH.",
        )
    return own[0] if own else None


def drafters_of(model: Path) -> dict[str, str]:
    """What can be written for --drafter since the files of a model bring it along -> where it is. ModelError if the
    model cannot be read; files beside it that cannot are warned of."""
    if has_modules(model):
        return {"mtp": "in the model's own files"}
    beside = [path for path in _beside(model) if is_beside(path.name)] if model.is_file() else []
    modules = [path for path in beside if path.name.lower().startswith(MODULES)]
    own = _of_that_name(model, modules)
    found = {"mtp": str(own[0])} if own else {}
    for path in (path for path in beside if path not in modules):
        try:
            architecture = str(open_gguf(path).metadata.get("general.architecture"))
        except ModelError as error:
            log.warning("%s It is no drafter.", error.message)
            continue
        if architecture in HEADS:
            found[f"{HEADS[architecture]}:{path}"] = str(path)
    return found


def drafter_fingerprint(spec: DrafterSpec, target: Path | None = None) -> str:
    """SHA-256, in hex, of what a drafter reads: the fingerprints of its draft models, and the bytes of its stores and
    of the weights of its heads, those beside the model at `target` too; "" if it reads no file but the target's.
    WagerError or OSError if one cannot be read."""
    read: list[str] = []
    for each in (each for each in spec.all if not each.parts):
        kind, (where, _) = each.option.argument, each.path_and_side
        path = companion_modules(target) if kind == "modules" and not where and target is not None else None
        if kind == "path" and where:
            read.append(target_fingerprint(open_model(where)[1]))
        elif kind in ("head", "modules", "store") and (where or path):
            path = path or hub.head_path(where)
            for file in sorted(path.glob("*.safetensors")) if path.is_dir() else part_paths(path):
                with file.open("rb") as opened:
                    read.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return hashlib.sha256("\n".join(read).encode()).hexdigest() if read else ""


def _of_that_name(model: Path, modules: Sequence[Path]) -> list[Path]:
    """Those files that belong to a model by their names, with which its own begins, the best first; one alone beside no
    other model does, too."""
    name = model.name.lower()
    own = [path for path in modules if re.match(rf"{re.escape(_base(path.name))}[-._]", name)]
    if not own and len(modules) == 1 and all(is_beside(path.name) for path in _beside(model)):
        own = list(modules)

    def rank(path: Path) -> tuple[bool, int, int, str]:
        return path.name.lower() != MODULES + name, -len(_base(path.name)), path.stat().st_size, path.name

    return sorted(own, key=rank)


def has_modules(model: Path) -> bool:
    """Whether the files of a model have MTP modules."""
    if model.is_file():
        file = open_gguf(model)
        return read_further_layers(file.metadata, file.where) > 0
    if not model.is_dir():
        return False
    names = SafetensorsSource(model).shapes
    return any(re.fullmatch(known.found, name) for known in FORMATS for name in names)


def _beside(model: Path) -> Iterator[Path]:
    """The other GGUF files in a model's folder, and in the one above if it is a part: parts often have their own."""
    own = set(part_names(model.name))
    folders = [model.parent, *([model.parent.parent] if len(own) > 1 else [])]
    for folder in folders:
        for path in sorted(folder.glob("*.gguf")):
            if path.name not in own and part_names(path.name)[0] == path.name:
                yield path


def _base(name: str) -> str:
    """The name of a model in that of a file of modules, without a quantisation."""
    whole = re.sub(r"-\d{5}-of-\d{5}$", "", name.lower().removesuffix(".gguf"))
    return _QUANTISATION.sub("", whole.removeprefix(MODULES))
