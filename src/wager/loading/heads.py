"""Heads on the target's states whose files were opened and checked, but not loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wager.drafter_spec import DrafterSpec
from wager.errors import ModelError
from wager.kernels.cpu import Kernels
from wager.loading.opened import OpenedModel, check_head_tokenizer, tokenizer_difference
from wager.models.companions import companion_modules
from wager.models.head_assistant import AssistantHead, CheckedAssistant, open_assistant
from wager.models.head_block import BlockHead, CheckedBlock, open_block
from wager.models.head_eagle import CheckedEagle, EagleHead, open_eagle
from wager.models.head_files import CheckedLayers, HeadFiles
from wager.models.head_gguf import open_head_files
from wager.models.head_medusa import CheckedMedusa, MedusaHead, open_medusa
from wager.models.head_mtp import CheckedMtp, MtpHead, open_mtp
from wager.models.hub import head_path
from wager.models.opening import trained_for_another
from wager.models.transformer import Decoder

Checked = CheckedEagle | CheckedMedusa | CheckedBlock | CheckedMtp | CheckedAssistant
LoadedHead = EagleHead | MedusaHead | BlockHead | MtpHead | AssistantHead

_OPEN: Mapping[str, Callable[..., Checked]] = {"eagle3": open_eagle, "medusa": open_medusa, "dflash": open_block}


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A head and the target that it was checked against."""

    path: Path
    target: OpenedModel
    head: Checked
    role = "head"
    """What it is called where it is loaded beside a target."""
    note = ""

    @property
    def depth(self) -> int | None:
        """Guesses of a round that it was made for, if its configuration says."""
        return self.head.depth

    def weight_bytes(self, kernels: Kernels) -> int:
        return self.head.weight_bytes(kernels)

    def workspace_bytes(self, kernels: Kernels) -> int:
        limits = self.target.limits
        return self.head.workspace_bytes(kernels, rows=limits.rows, sequences=limits.sequences, context=limits.context)

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position."""
        return self.head.token_bytes(kernels)

    def load(self, decoder: Decoder, num_blocks: int) -> LoadedHead:
        return self.head.load(decoder, self.target.weights, num_blocks=num_blocks)


def open_head(spec: DrafterSpec, target: OpenedModel) -> OpenedHead:
    """The head that a drafter option names: modules without a path are in the target's own files, or in a GGUF file
    beside its own. Its matrices are quantised where the target's are. ModelError if it is absent, damaged, or was made
    for another target or tokenizer."""
    modules = spec.option.argument == "modules"
    where, side = spec.path_and_side
    beside = companion_modules(target.path) if modules and not where else None
    inside = modules and not where and beside is None
    path = beside or (target.path if inside else head_path(where))
    if inside and not path.exists():
        raise ModelError(
            f"{path.name} has no MTP weights: they are read from files.",
            "Give a model that has them, or another drafter.",
        )
    files = open_head_files(path)
    check_provenance(files, target)
    dtype = target.draft_dtype
    if files.is_assistant and not modules:
        raise ModelError(f"{files.where} is an assistant, no head for {spec.name}.", f"Write mtp:{where}.")
    if not modules:
        opened = _OPEN[spec.name](files, target.spec, dtype=dtype)
        noted = files.keys.section("wager").integers("taps")  # as `wager train` writes them
        if noted and isinstance(opened, CheckedLayers) and list(opened.taps) != noted:
            found, wanted = (", ".join(map(str, taps)) for taps in (opened.taps, noted))
            raise ModelError(
                f"The head in {files.where} taps the target after layers {found}; it was trained on {wanted}.",
                "Its config.json was changed, or belongs to another head.",
            )
        return OpenedHead(path, target, opened)
    if files.is_assistant:
        return OpenedHead(path, target, _open_assistant(files, target, spec))
    after_norm = None if side is None else side == "after"
    opened_mtp = open_mtp(files, target.spec, dtype=dtype, inside=inside, after_norm=after_norm)
    if spec.trees and opened_mtp.modules > 1:
        raise ModelError(
            f"{path.name} has {opened_mtp.modules} MTP modules, which guess in turn; trees are those of a single one.",
            "Use mtp.",
        )
    return OpenedHead(path, target, opened_mtp)


def _open_assistant(files: HeadFiles, target: OpenedModel, spec: DrafterSpec) -> CheckedAssistant:
    asked = {"makes trees": spec.trees, "reads states on a side that is chosen": spec.path_and_side[1] is not None}
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise ModelError(
            f"{files.where} is an assistant, whose guesses are chains from the states behind the target's last norm; "
            f"{str(spec)!r} {what}.",
            f"Write mtp:{spec.path_and_side[0] or 'PATH'}.",
        )
    return open_assistant(files, target.spec, dtype=target.draft_dtype)


def check_provenance(files: HeadFiles, target: OpenedModel) -> None:
    """ModelError if the head says what it was trained for and it is not this: `wager train` notes the fingerprints of
    the target and of its tokenizer. One that notes no tokenizer but has one, as GGUF files do, is refused for another
    vocabulary, and warned of for another chat template."""
    noted, path = files.keys.section("wager"), Path(files.where)
    own = path != target.path and files.has_tokenizer
    if found := trained_for_another(noted, target.weights, target.tokenizer, target.path.name):
        because = tokenizer_difference(path, target.tokenizer) if own and "tokenizer" in found else ""
        raise ModelError(
            f"The head in {files.where} was trained {found}{because and f': {because}'}.",
            "Give a head of this target, or train one: wager train.",
        )
    if own and not noted.text("tokenizer_fingerprint"):
        check_head_tokenizer(path, target.tokenizer)
