"""The native state of the steps against the plain one, under random traffic in caches that are too small for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from oracle.block_pool import BLOCK_SIZE, PlainBlockPool
from oracle.step_state import PlainSequence, PlainStepState, Row, slot
from wager.errors import UsageError
from wager.kernels._native import BlockPool, SequenceState, StepState

STOP = 7
VOCABULARY = range(4), range(3, 8)  # of prompts, few enough for common prefixes; of answers


class Traffic:
    """One trace: both states get the same arrivals, ends and passes, and have to agree on all that can be seen.

    `cells` holds what the cache's slots would hold: the tokens, and what stands before them, of the rows that passes
    compute. Reading a sequence's computed tokens back must always give its own.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        self.blocks, rows = draw.choice([4, 8, 8, 16, 40]), draw.choice([8, 24, 100])
        sizes = {"max_rows": rows, "max_sequences": draw.randint(1, 6), "max_context": self.blocks * BLOCK_SIZE}
        prefix_cache = draw.random() < 0.8
        self.max_rows, self.max_context = rows, sizes["max_context"]
        self.pool = BlockPool(self.blocks, prefix_cache=prefix_cache)
        self.state = StepState(pool=self.pool, **sizes)
        self.plain = PlainStepState(PlainBlockPool(self.blocks, prefix_cache=prefix_cache), **sizes)
        self.native: dict[str, SequenceState] = {}
        self.cells: dict[int, tuple[str, int, tuple[int, ...]]] = {}
        self.seen: Counter[str] = Counter()
        self.arrived = 0

    def run(self, steps: int) -> Counter[str]:
        for _ in range(steps):
            if len(self.native) < 8 and self.random.random() < 0.4:
                self._arrive()
            if self.native and self.random.random() < 0.05:
                self._abort()
            if self.random.random() < 0.02:
                self.state.preempt_all()
                self.plain.preempt_all()
            self._step()
        for _ in range(3000):
            if not self.native:
                break
            self._step()
        assert not self.native, "every request ends"
        self.pool.check({})
        return self.seen

    # ---- what happens ---------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        draw, name = self.random, f"r{self.arrived}"
        self.arrived += 1
        length = draw.choice([1, 5, 15, 16, 17, 33, draw.randint(1, self.max_context - 2)])
        length = min(length, self.max_context - 1)
        prompt = [draw.choice(VOCABULARY[0])] * min(length, draw.choice([16, 32, 64]))
        prompt += [draw.choice(VOCABULARY[0]) for _ in range(length - len(prompt))]
        longest = length + draw.choice([1, 2, 20, 60, 2**62])
        stop_ids = draw.choice([[], [STOP], [STOP, 6]])
        tenant = draw.choice(["", "", "anna"])
        for choice in range(draw.choice([1, 1, 1, 2, 3])):
            seq_id = f"{name}#{choice}" if choice else name
            self.plain.add(PlainSequence(seq_id, name, choice, list(prompt), longest, stop_ids, tenant))
            self.native[seq_id] = native_sequence(self.plain.sequences[seq_id])
            self.state.add(self.native[seq_id])

    def _abort(self) -> None:
        request_id = self.plain.sequences[self.random.choice(sorted(self.native))].request_id
        for sequence in [each for each in self.plain.sequences.values() if each.request_id == request_id]:
            self.seen["aborted while it runs" if sequence in self.plain.running else "aborted while it waits"] += 1
            self._remove(sequence)

    def _remove(self, sequence: PlainSequence) -> None:
        self.plain.remove(sequence)
        self.state.remove(self.native.pop(sequence.id))

    def _step(self) -> None:
        drafts, kept, most = self.random.randint(0, 5), self.random.randint(0, 3), self.random.choice([1, 9, 40, 999])
        kept = min(kept, self.max_rows // 2)
        rows = self.plain.schedule(drafts, kept, most)
        assert self.state.schedule(drafts, kept, most, 1.0) == rows
        self._agree()
        self.seen["room for guesses given up"] += any(row[3] and not row[4] for row in rows) and drafts > 0
        budget = self.max_rows - sum(len(row[2]) for row in rows)
        results, expected, moves, ended = [], [], [], []
        for row in rows:
            sequence, tokens, accepted = self.plain.sequences[row[0]], [], []
            guesses = min(row[4], budget)
            budget -= guesses
            if row[3]:
                accepted = sorted(self.random.sample(range(guesses), self.random.randint(0, guesses)))
                tokens = [self.random.choice(VOCABULARY[1]) for _ in range(len(accepted) + 1)]
                error = self.random.random() < 0.01
                if error:
                    tokens.pop()
            self._compute(row, tokens, accepted)
            results.append((self.native[row[0]], len(row[2]), guesses, tuple(tokens), tuple(accepted)))
            count, finish, moved = self.plain.commit(sequence, len(row[2]), guesses, tokens, accepted)
            expected.append((count, finish))
            moves += moved
            self.seen["cut off"] += count < len(tokens)
            self.seen["moved"] += len(moved)
            if finish or (row[3] and error):
                ended.append(sequence)
        done, source, target = self.state.commit(results, 2.0)
        assert done == expected and list(zip(source, target, strict=True)) == moves
        self.cells |= {to: self.cells[place] for place, to in moves}
        self._agree()
        for sequence in ended:
            self.seen["preempted"] += sequence.stats["preemptions"] > 0
            self.seen["overtaken"] += sequence.overtaken > 0
            self.seen["cached"] += sequence.stats["cached_tokens"] > 0
            self._remove(sequence)
        self._agree()

    def _compute(self, row: Row, tokens: list[int], accepted: list[int]) -> None:
        """Fill the cells of a pass's rows; those of guesses that are wrong with what is nobody's."""
        sequence, table = self.plain.sequences[row[0]], self.pool.block_table(row[0])
        known = len(sequence.tokens)
        path = [*sequence.tokens, *tokens]
        for position in range(row[1], row[1] + len(row[2])):
            self.cells[slot(table, position)] = (sequence.tenant, position, tuple(path[: position + 1]))
        for node in range(row[4] if row[3] else 0):
            self.cells[slot(table, known + node)] = ("", -1, ())
        for depth, node in enumerate(accepted):
            place = slot(table, known + node)
            self.cells[place] = (sequence.tenant, known + depth, tuple(path[: known + depth + 1]))

    # ---- what must agree ------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        assert self.state.running == [each.id for each in self.plain.running]
        assert self.state.waiting == [each.id for each in self.plain.waiting]
        assert self.pool.num_free_blocks == self.plain.pool.num_free_blocks
        assert self.state.num_decoding == sum(each.pending == 1 for each in self.plain.running)
        for seq_id, sequence in self.plain.sequences.items():
            state = self.native[seq_id]
            assert state.tokens_from(0) == sequence.tokens
            assert state.num_computed_tokens == sequence.computed
            assert state.running == (sequence in self.plain.running)
            assert {name: getattr(state, name) for name in sequence.stats} == sequence.stats
            table = self.pool.block_table(seq_id)
            assert table == self.plain.pool.block_table(seq_id)
            for at in range(sequence.computed):
                assert self.cells[slot(table, at)] == (sequence.tenant, at, tuple(sequence.tokens[: at + 1]))
        self.pool.check({each.id: each.computed for each in self.plain.running})


def native_sequence(plain: PlainSequence) -> SequenceState:
    return SequenceState(
        id=plain.id,
        request_id=plain.request_id,
        choice=plain.choice,
        tokens=plain.tokens,
        max_length=plain.max_length,
        stop_ids=plain.stop_ids,
        tenant=plain.tenant,
        seed=0,
        temperature=None,
        filters=(0, 1.0, 0.0),
        greedy=0.0,
    )


@pytest.mark.parametrize("seeds", [range(25), range(1000, 1800)], ids=["some", "many"])
def test_the_native_state_and_the_plain_one_agree(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += Traffic(seed).run(40)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert all(seen.values()) and len(seen) == 8, seen


# ---- misuse ---------------------------------------------------------------------------------------------------------


def sequence(seq_id: str) -> SequenceState:
    return native_sequence(PlainSequence(seq_id, seq_id, 0, [1] * 20, 99, (), ""))


@pytest.fixture
def step() -> tuple[StepState, SequenceState, SequenceState]:
    """Two sequences whose rows were scheduled."""
    state = StepState(pool=BlockPool(8, prefix_cache=True), max_rows=64, max_sequences=4, max_context=128)
    first, second = sequence("a"), sequence("b")
    state.add(first)
    state.add(second)
    assert len(state.schedule(0, 0, 64, 0.0)) == 2
    return state, first, second


def test_a_step_with_a_wrong_result_changes_nothing(step: tuple[StepState, SequenceState, SequenceState]) -> None:
    state, first, second = step
    for rows, tokens in ((20, ("x",)), (20, (2**31,)), (21, (1,)), (-1, ())):
        with pytest.raises((UsageError, ValueError)):
            state.commit([(first, 20, 0, (3,), ()), (second, rows, 0, tokens, ())], 1.0)  # type: ignore[list-item]
        assert (first.num_tokens, first.num_computed_tokens, first.rounds) == (20, 0, 0)
    state.preempt_all()
    with pytest.raises(UsageError, match="rows of 'a' are not those that were scheduled"):
        state.commit([(first, 20, 0, (3,), ())], 1.0)


def test_a_sequence_is_added_and_removed_once(step: tuple[StepState, SequenceState, SequenceState]) -> None:
    state, first, _ = step
    for call, words in ((state.add, "runs or waits already"), (state.remove, "neither runs nor waits")):
        with pytest.raises(UsageError, match=f"'a' {words}"):
            call(sequence("a"))
    state.remove(first)
    with pytest.raises(UsageError, match="'a' neither runs nor waits"):
        state.remove(first)
    assert state.running == ["b"]
