"""The native state of the steps against the plain one, under random traffic in caches that are too small for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from oracle.block_pool import BLOCK_SIZE, PlainBlockPool
from oracle.step_state import PlainSequence, PlainStepState, Row, slot
from wager.engine.scheduler import CommittedStep
from wager.errors import UsageError
from wager.kernels._native import BlockPool, SequenceState, StepState
from wager.types import Outcome, OutputDelta, Span, StepRecord, Verdict

STOP = 7
VOCABULARY = range(4), range(3, 8)  # of prompts, few enough for common prefixes; of answers


CLASSES = {"span": Span, "delta": OutputDelta, "committed": CommittedStep, "record": StepRecord}


@dataclass
class Texts:
    """A sequence whose text has a letter for each token, and may end it after so many of them in a step."""

    state: SequenceState
    request_id: str
    choice: int
    cut: int = 9

    def add_text(self, tokens: Sequence[int], finish: str | None) -> tuple[str, int, str | None]:
        text = "".join(chr(97 + token) for token in tokens[: self.cut])
        return (text, self.cut, "stop") if len(tokens) > self.cut else (text, len(tokens), finish)


class Traffic:
    """One trace: both states get the same arrivals, ends and passes, and have to agree on all that can be seen.

    `cells` holds what the cache's slots would hold: the tokens, and what stands before them, of the rows that passes
    compute. Reading a sequence's computed tokens back must always give its own.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        self.blocks, rows = draw.choice([4, 8, 8, 16, 40]), draw.choice([8, 24, 100])
        sizes: dict[str, Any] = {
            "max_rows": rows,
            "max_sequences": draw.randint(1, 6),
            "max_drafts": 0,
        }
        sizes |= {"max_context": self.blocks * BLOCK_SIZE, "max_prefill_rows": draw.choice([None, None, 1, 9, 40])}
        prefix_cache = draw.random() < 0.8
        self.max_rows, self.max_context = rows, sizes["max_context"]
        self.pool = BlockPool(self.blocks, prefix_cache=prefix_cache)
        self.state = StepState(pool=self.pool, **sizes, **CLASSES)
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
        tenant, streamed = draw.choice(["", "", "anna"]), draw.random() < 0.3
        for choice in range(draw.choice([1, 1, 1, 2, 3])):
            seq_id = f"{name}#{choice}" if choice else name
            self.plain.add(PlainSequence(seq_id, name, choice, list(prompt), longest, stop_ids, tenant, streamed))
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
        last = self._record()
        drafts = self.state.max_drafts = self.plain.max_drafts = self.random.randint(0, 5)
        rows = self.plain.next(last)
        assert self.state.next(last, 1.0) == rows
        self.seen["bounded by what steps took"] += last != ()
        self._agree()
        self.seen["room for guesses given up"] += any(row[3] and not row[4] for row in rows) and drafts > 0
        budget = self.max_rows - sum(len(row[2]) for row in rows)
        spans, outcomes, known, deltas, moves, ended = [Span(*row) for row in rows], {}, {}, [], [], []
        invalid: list[int] = []
        sequences = {
            name: Texts(state, self.plain.sequences[name].request_id, self.plain.sequences[name].choice)
            for name, state in self.native.items()
        }
        drafted = accepted_tokens = 0
        for row in rows:
            sequence, tokens, accepted = self.plain.sequences[row[0]], [], []
            guesses = min(row[4], budget)
            budget -= guesses
            error = False
            if row[3]:
                accepted = sorted(self.random.sample(range(guesses), self.random.randint(0, guesses)))
                tokens = [self.random.choice(VOCABULARY[1]) for _ in range(len(accepted) + 1)]
                error = self.random.random() < 0.01
                if error:
                    tokens.pop()
                if self.random.random() < 0.05:
                    sequences[row[0]].cut = self.random.randint(1, 3)
            self._compute(row, tokens, accepted)
            if error:
                invalid += self.pool.block_table(row[0])
            drafted += guesses
            # a text ends the sequence with the tokens before the cut, unless one of them ends it
            cut = sequences[row[0]].cut if row[3] else 9
            until = next((at + 1 for at, token in enumerate(tokens) if token in sequence.stop_ids), len(tokens))
            until = min(until, max(1, min(sequence.max_length, self.max_context) - len(sequence.tokens)))
            by_text = until > cut
            count, finish, moved = self.plain.commit(
                sequence, len(row[2]), guesses, tokens[:cut] if by_text else tokens, accepted
            )
            moves += moved
            self.seen["cut off"] += count < len(tokens)
            self.seen["moved"] += len(moved)
            self.seen["ended by its text"] += by_text
            if not row[3]:
                continue
            finish = "stop" if by_text else finish
            names = tuple("d" if node % 2 else "" for node in accepted) + ("",) * (len(tokens) - len(accepted))
            outcomes[row[0]] = Outcome(
                Verdict(row[0], tuple(accepted), tuple(tokens)), guesses, names, (), "no" if error else "", 418
            )
            failed = error and not finish
            deltas.append(
                OutputDelta(
                    sequence.request_id,
                    sequence.choice,
                    tuple(tokens[:count]),
                    "".join(chr(97 + token) for token in tokens[:count]),
                    names[:count],
                    error="no" if failed else "",
                    error_status=418 if failed else 0,
                )
            )
            accepted_tokens += names[:count].count("d") if guesses else 0
            if finish or error:
                ended.append((len(deltas) - 1, finish or "error", sequence))
            else:
                known[row[0]] = tuple(tokens[:count])
        committed, last, source, target, lost = self.state.commit(spans, outcomes, sequences, 2.0)
        self.plain.verified(drafted)
        assert committed == (
            deltas,
            known,
            [sequence.id for _, _, sequence in ended],
            [outcome.verdict for outcome in outcomes.values()],
            StepRecord(
                sum(len(row[2]) for row in rows) + drafted,
                len(rows),
                drafted,
                accepted_tokens,
                sum(len(delta.token_ids) for delta in deltas),
                {},
                tuple(row[1] for row in rows),
            ),
        )
        assert isinstance(committed.record, StepRecord) and all(isinstance(each, Span) for each in spans)
        assert last == [(place, finish) for place, finish, _ in ended] and lost == invalid
        assert list(zip(source, target, strict=True)) == moves
        self.cells |= {to: self.cells[place] for place, to in moves}
        self._agree()
        for _, _, sequence in ended:
            self.seen["preempted"] += sequence.stats["preemptions"] > 0
            self.seen["overtaken"] += sequence.overtaken > 0
            self.seen["cached"] += sequence.stats["cached_tokens"] > 0
            self._remove(sequence)
        self._agree()

    def _record(self) -> StepRecord | tuple[()]:
        draw = self.random
        if draw.random() < 0.2:
            return ()
        sequences, drafted, prompts = draw.randint(1, 5), draw.randint(0, 9), draw.choice([0, 0, 30, 200])
        seconds = {"forward": draw.choice([0.001, 0.01, 0.3]), "policy": draw.random() * 0.01}
        return StepRecord(sequences + drafted + prompts, sequences, drafted, 0, 0, seconds)

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
        assert self.state.num_waiting == len(self.plain.waiting)
        assert self.pool.num_free_blocks == self.plain.pool.num_free_blocks
        assert self.state.rows_beside_others == self.plain.prompt_rows.beside_others(streamed=self.plain.streamed)
        for seq_id, sequence in self.plain.sequences.items():
            state = self.native[seq_id]
            assert state.tokens_from(0) == sequence.tokens
            assert state.num_computed_tokens == sequence.computed
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
        streamed=plain.streamed,
    )


@pytest.mark.parametrize("seeds", [[*range(12), 1007], range(1000, 1100)], ids=["some", "many"])
def test_the_native_state_and_the_plain_one_agree(seeds: Sequence[int]) -> None:
    """In 1007 blocks run out before short prompts have theirs."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += Traffic(seed).run(40)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert all(seen.values()) and len(seen) == 10, seen


# ---- misuse ---------------------------------------------------------------------------------------------------------


def sequence(seq_id: str) -> SequenceState:
    return native_sequence(PlainSequence(seq_id, seq_id, 0, [1] * 20, 99, (), ""))


@pytest.fixture
def step() -> tuple[StepState, SequenceState, SequenceState]:
    """Two sequences whose rows were scheduled."""
    state = StepState(
        pool=BlockPool(8, prefix_cache=True),
        max_rows=64,
        max_sequences=4,
        max_context=128,
        max_drafts=0,
        max_prefill_rows=None,
        **CLASSES,
    )
    first, second = sequence("a"), sequence("b")
    state.add(first)
    state.add(second)
    assert len(state.next((), 0.0)) == 2
    return state, first, second


def test_a_step_with_a_wrong_result_changes_nothing(step: tuple[StepState, SequenceState, SequenceState]) -> None:
    state, first, second = step
    sequences = {"a": Texts(first, "a", 0), "b": Texts(second, "b", 0)}
    whole, right = Span("a", 0, (1,) * 20, True), Outcome(Verdict("a", (), (3,)))
    wrong = [
        (Span("b", 0, (1,) * 20, True), Outcome(Verdict("b", (), ("x",)))),  # type: ignore[arg-type]
        (Span("b", 0, (1,) * 20, True), Outcome(Verdict("b", (), (2**31,)))),
        (Span("b", 0, (1,) * 21, True), Outcome(Verdict("b", (), (1,)))),
        (Span("c", 0, (1,) * 20, True), Outcome(Verdict("c", (), (1,)))),
        (Span("b", 0, (1,) * 20, True), Outcome(Verdict("b", (), (1,)), drafted=None)),  # type: ignore[arg-type]
        (Span("b", 0, (1,) * 20, True), (1, 2)),
        (Span("b", 0, (1,) * 20, True), Outcome((1,))),  # type: ignore[arg-type]
        (Span("b", 0, 20, True), Outcome(Verdict("b", (), (1,)))),  # type: ignore[arg-type]
        ((), None),
    ]
    for span, outcome in wrong:
        outcomes: Any = {"a": right, **({span[0]: outcome} if span else {})}
        with pytest.raises((UsageError, ValueError, KeyError)):
            state.commit([whole, span], outcomes, sequences, 1.0)  # type: ignore[list-item]
        assert (first.num_tokens, first.num_computed_tokens, first.rounds) == (20, 0, 0)
    both = [whole, Span("b", 0, (1,) * 20, True)]
    fails = Texts(second, "b", 0)
    fails.add_text = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
    for other, last, raised in (
        (sequences["b"], Outcome(Verdict("b", (), (3,)), drafted=1, drafted_by=3), TypeError),  # type: ignore[arg-type]
        (fails, Outcome(Verdict("b", (), (3,))), ZeroDivisionError),
    ):
        with pytest.raises(raised):
            state.commit(both, {"a": right, "b": last}, {**sequences, "b": other}, 1.0)
        assert (first.num_tokens, first.num_computed_tokens, first.rounds) == (20, 0, 0)
    for given in ((3, {"a": right}, sequences), ([whole], [], sequences), ([whole], {}, [])):
        with pytest.raises(ValueError, match="dicts"):
            state.commit(*given, 1.0)  # type: ignore[arg-type]
    for texts in ("text", ("", 2, None), ("", -1, None), ("", 1), ("", "1", None)):
        sequences["a"].add_text = lambda *_, texts=texts: texts  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="token"):
            state.commit([whole], {"a": right}, sequences, 1.0)
        assert (first.num_tokens, first.num_computed_tokens, first.rounds) == (20, 0, 0)
    state.preempt_all()
    with pytest.raises(UsageError, match="rows of 'a' are not those that were scheduled"):
        state.commit([whole], {"a": right}, sequences, 1.0)
    for record in ((1, 2), (1, 1, "0", 0, 0, {}), (1, 1, 0, 0, 0, [])):
        with pytest.raises((ValueError, RuntimeError)):
            state.next(record, 1.0)  # type: ignore[arg-type]


def test_a_sequence_is_added_and_removed_once(step: tuple[StepState, SequenceState, SequenceState]) -> None:
    state, first, _ = step
    for call, words in ((state.add, "runs or waits already"), (state.remove, "neither runs nor waits")):
        with pytest.raises(UsageError, match=f"'a' {words}"):
            call(sequence("a"))
    state.remove(first)
    with pytest.raises(UsageError, match="'a' neither runs nor waits"):
        state.remove(first)
    assert state.running == ["b"]
