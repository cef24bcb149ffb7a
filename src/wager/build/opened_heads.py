"""Heads on the target's states whose files were opened and checked, but not loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wager.build.opened import OpenedModel
from wager.draft.heads.autoregressive import StateHead
from wager.draft.heads.block import SlotHead
from wager.draft.heads.kinds import head_kind
from wager.draft.heads.parallel import ParallelHead
from wager.draft.registry import DrafterSpec
from wager.errors import ModelError
from wager.kernels.base import Kernels
from wager.models.fingerprint import trained_for_another
from wager.models.head_block import OpenedBlock, open_block
from wager.models.head_eagle import OpenedEagle, open_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_medusa import OpenedMedusa, open_medusa
from wager.models.matrices import Matrices
from wager.models.transformer import Decoder

Opened = OpenedEagle | OpenedMedusa | OpenedBlock

_OPEN: Mapping[str, Callable[..., Opened]] = {"eagle3": open_eagle, "medusa": open_medusa, "dflash": open_block}


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A head and the target that it was checked against."""

    path: Path
    target: OpenedModel
    head: Opened
    role = "head"
    """What it is called where it is loaded beside a target."""

    @property
    def depth(self) -> int | None:
        """Guesses of a round that it was made for, if its configuration says."""
        return self.head.spec.depth

    def weight_bytes(self, kernels: Kernels) -> int:
        return self.head.weight_bytes(kernels)

    def workspace_bytes(self, kernels: Kernels) -> int:
        limits = self.target.limits
        return self.head.workspace_bytes(kernels, rows=limits.rows, sequences=limits.sequences, context=limits.context)

    def token_bytes(self, kernels: Kernels) -> int:
        """Bytes of keys and values per position."""
        return self.head.token_bytes(kernels)

    def load(self, decoder: Decoder, num_blocks: int) -> StateHead | ParallelHead | SlotHead:
        return self.head.load(decoder, self.target.weights, num_blocks=num_blocks)


def open_head(spec: DrafterSpec, target: OpenedModel) -> OpenedHead:
    """The head that a drafter option names. Its matrices are quantised where the target's are. ModelError if it is
    absent, damaged, or was made for another target or tokenizer."""
    path = Path(spec.argument or "").expanduser()
    files = HeadFiles(path)
    check_provenance(files, target)
    quantised = any(Matrices(target.weights, target.dtype).formats.values())
    return OpenedHead(path, target, _OPEN[head_kind(spec.name)](files, target.spec, quantised=quantised))


def check_provenance(files: HeadFiles, target: OpenedModel) -> None:
    """ModelError if the head says what it was trained for and it is not this: `wager train` notes the fingerprints of
    the target and of its tokenizer."""
    noted = files.keys.section("wager")
    if found := trained_for_another(noted, target.weights, target.tokenizer, target.path.name):
        raise ModelError(
            f"The head in {files.where} was trained {found}.", "Give a head of this target, or train one: wager train."
        )
