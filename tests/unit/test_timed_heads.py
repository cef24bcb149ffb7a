"""Drafters that read the target's states or rows are timed on random ones, shown as a target's passes would."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import test_block_heads
import test_eagle_head
import test_medusa_heads
from decoder_engines import decoder_on
from eagle_heads import HIDDEN, VARIANTS, VOCAB

from oracle.kernels import ReferenceKernels
from wager.draft.base import ComputedRows, Drafter
from wager.draft.heads.autoregressive import HeadDrafter
from wager.draft.heads.one_pass import BlockDrafter, ParallelDrafter
from wager.draft.recycling import RecyclingDrafter
from wager.engine.proposer import Proposer
from wager.kernels.base import TargetOutput
from wager.profiling.calibrate import time_drafting
from wager.types import Draft, DraftRequest


class _Checked:
    """The states shown to a drafter: of consecutive positions, each sequence's own, and drafts of the position behind
    the newest one's successor."""

    shown: dict[str, int]
    drafted: int

    def read(self, output: TargetOutput, computed: Sequence[ComputedRows]) -> None:
        assert output.last_hidden is not None
        assert len({row for rows in computed for row in rows.rows}) == sum(len(rows.rows) for rows in computed)
        for rows in computed:
            assert rows.start == self.shown.get(rows.seq_id, 0)
            self.shown[rows.seq_id] = rows.start + len(rows.rows)
            assert output.last_hidden[rows.logits_row].shape == (HIDDEN,)
        super().read(output, computed)  # type: ignore[misc]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        assert all(request.position == self.shown[request.seq_id] + 1 for request in requests)
        drafts: list[Draft] = super().propose(requests)  # type: ignore[misc]
        assert all(len(draft) for draft in drafts)
        self.drafted += len(drafts)
        return drafts


class _Eagle(_Checked, HeadDrafter):
    pass


class _Medusa(_Checked, ParallelDrafter):
    pass


class _Block(_Checked, BlockDrafter):
    pass


def eagle(folder: Path) -> Drafter:
    weights = test_eagle_head.target_weights()
    reference = test_eagle_head.reference_of(VARIANTS["eagle3.1"], weights)
    decoder = decoder_on(weights, ReferenceKernels("float32"))
    return _Eagle(test_eagle_head.head_of(reference, decoder, weights, folder))


def medusa(folder: Path) -> Drafter:
    test_medusa_heads.save(folder, test_medusa_heads.VLLM, test_medusa_heads.tensors())
    return _Medusa(test_medusa_heads.loaded(folder, decoder_on(test_medusa_heads.WEIGHTS, ReferenceKernels("float32"))))


def block(folder: Path) -> Drafter:
    reference = test_block_heads.ReferenceBlock(next(iter(test_block_heads.KINDS.values())))
    decoder = decoder_on(test_block_heads.WEIGHTS, ReferenceKernels("float32"))
    return _Block(test_block_heads.loaded(reference.save(folder), decoder))


@pytest.mark.parametrize("made", [eagle, medusa, block])
def test_heads_draft_from_states_that_come_as_a_targets_would(made: Callable[[Path], Drafter], tmp_path: Path) -> None:
    drafter = made(tmp_path)
    assert isinstance(drafter, _Checked)
    drafter.shown, drafter.drafted = {}, 0
    proposer = Proposer(drafter, vocab=VOCAB)
    curve = time_drafting(proposer, vocab=VOCAB, hidden=HIDDEN, seconds=0.0, clock=time.perf_counter, batches=(1, 2))
    assert not proposer.pauses.failures(proposer.name)
    assert drafter.drafted == 2 * 4 * (1 + 2)  # two rounds of four depths, for one request and for two
    assert curve.seconds(1, 4) > 0


def test_a_drafter_that_reads_rows_is_timed() -> None:
    curve = time_drafting(
        Proposer(RecyclingDrafter(VOCAB), vocab=VOCAB),
        vocab=VOCAB,
        hidden=HIDDEN,
        seconds=0.0,
        clock=time.perf_counter,
        batches=(1, 4),
    )
    assert np.isfinite(curve.seconds(4, 3))
    assert curve.seconds(1, 3) > 0
