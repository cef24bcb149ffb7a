"""Measured drafters: the file of results, prices of rows, the bound of a fixed number of guesses, and the tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dev"))
from drafter_table import (
    PLAIN,
    DecodeSeconds,
    DrafterCurve,
    DrafterFigures,
    DrafterRuns,
    FixedRounds,
    RowPrices,
    RowSeconds,
    RunFile,
    StaticOptimum,
    Turn,
    TurnAnswer,
    by_family,
    static_optimum,
    tables,
)

from wager.errors import UsageError

CARD = {"model": "toy", "kernels": {"name": "k"}, "settings": {"dtype": "auto", "max_tokens": 9}, "date": "2026-01-01"}


def answer(rows: dict[int, tuple[int, float]], *, tokens: int, draft: float = 0.0, same: bool = True) -> TurnAnswer:
    """An answer whose decoding took these steps: their number and seconds by rows."""
    steps = DecodeSeconds({each: RowSeconds(*value) for each, value in rows.items()}, draft=draft)
    rounds = 1 + sum(count for count, _ in rows.values())
    seconds = draft + sum(value for _, value in rows.values())
    return TurnAnswer(tokens, rounds, 0, 0, 1.0, seconds, steps, same)


def turn(prompt: str, family: str, pace: float, **changes: TurnAnswer) -> Turn:
    """A plain step takes `pace` seconds; steps of 2 rows 1.5 and of 4 rows 2 times that."""
    answers = {
        PLAIN: answer({1: (20, 20 * pace)}, tokens=21),
        "two": answer({1: (2, 2 * pace), 2: (9, 9 * 1.5 * pace)}, tokens=21, draft=1.1 * pace),
        "four": answer({4: (8, 8 * 2 * pace)}, tokens=21),
    }
    return Turn(0.0, prompt, family, answers | changes)


TURNS = [turn("a", "qa", 0.01), turn("b", "qa", 0.03), turn("c", "rag", 0.002)]


def test_prices_are_those_of_each_turns_own_pace() -> None:
    """The paces differ by a factor of 15, so a mean over all seconds would be off."""
    prices = RowPrices.of(TURNS)
    assert prices.rows == (1, 2, 4)
    assert [prices.price(rows) for rows in (1, 2, 3, 4, 6)] == pytest.approx([1, 1.5, 1.75, 2, 2.5])


def curve(taus: list[float], lengths: list[tuple[float, ...]], draft_s: list[float]) -> DrafterCurve:
    rounds = tuple(FixedRounds(tau, length) for tau, length in zip(taus, lengths, strict=True))
    return DrafterCurve("two", 0.0, 4, False, (0.5,) * len(taus), rounds, tuple(draft_s), 0.5)


def test_the_bound_follows_wrong_prices() -> None:
    """Free rows and guesses: as many as there are. Dear rows: one. Dear guesses: none."""
    taus, full = [1.8, 2.4, 2.9], [(0, 1.0), (0, 0, 1.0), (0, 0, 0, 1.0)]
    free, dear = RowPrices((1, 4), (1.0, 1.0)), RowPrices((1, 2, 4), (1.0, 1.1, 9.0))
    assert static_optimum(curve(taus, full, [0.0] * 3), free) == StaticOptimum(3, pytest.approx(2.9))
    assert static_optimum(curve(taus, full, [0.0] * 3), dear) == StaticOptimum(1, pytest.approx(1.8 / 1.1))
    assert static_optimum(curve(taus, full, [0.5, 1.0, 1.5]), free) == StaticOptimum(0, 1.0)


def test_figures_are_ratios_of_sums_on_the_same_prompts() -> None:
    figures = DrafterFigures.of(TURNS, "two")
    assert figures is not None
    assert (figures.prompts, figures.changed) == (3, 0)
    assert figures.tau == pytest.approx(63 / 36)
    assert figures.speedup == pytest.approx(20 / (2 + 13.5 + 1.1))
    assert figures.draft_share == pytest.approx(1.1 / 11)
    assert DrafterFigures.of(TURNS, "three") is None
    changed = turn("d", "rag", 0.01, two=answer({1: (10, 0.2)}, tokens=21, same=False))
    families = by_family([*TURNS, changed], "two")
    assert {name: each.changed for name, each in families.items()} == {"qa": 0, "rag": 1}
    assert families["rag"].speedup == pytest.approx((0.04 + 0.2) / (16.6 * 0.002 + 0.2))


# ---- the file ------------------------------------------------------------------------------------------------------


def measured(path: Path) -> DrafterRuns:
    file = RunFile(path)
    file.begin(CARD, ["two", "four"])
    file.add_curve(curve([1.5, 1.8], [(0.5, 0.5), (0.4, 0.2, 0.4)], [0.05, 0.1]))
    for each in TURNS:
        file.add_turn(each)
    return file.begin(CARD, ["two", "four"])


def test_what_is_written_is_read_and_a_measurement_that_was_killed_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    runs = measured(path)
    assert (runs.turns, runs.drafters) == (TURNS, ["two", "four"])
    assert runs.curve(0.0, "two") == curve([1.5, 1.8], [(0.5, 0.5), (0.4, 0.2, 0.4)], [0.05, 0.1])
    assert runs.curve(0.8, "two") is None
    assert (runs.measured(0.0, "a"), runs.measured(0.8, "a")) == ({PLAIN, "two", "four"}, set())
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1])[:-20])  # within the last turn
    file = RunFile(path)
    runs = file.begin(CARD, ["four", "more"])
    assert (runs.turns, runs.drafters) == (TURNS[:-1], ["two", "four", "more"])
    file.add_turn(TURNS[-1])
    again = file.begin(CARD, [])
    assert (again.turns, again.drafters) == (TURNS, ["two", "four", "more"])


def test_other_conditions_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    measured(path)
    other = {**CARD, "settings": {"dtype": "bf16", "max_tokens": 9}}
    with pytest.raises(UsageError, match="was measured with dtype = 'auto', and this is 'bf16'"):
        RunFile(path).begin(other, [])
    for line in ("{}", "[]", "half", json.dumps({"kind": "turn"}), json.dumps({"kind": "card"})):
        path.write_text(line + "\n")
        with pytest.raises(UsageError, match="line 1, is no result of measured drafters"):
            RunFile(path).read()
    assert RunFile(tmp_path / "none.jsonl").read() is None


# ---- the tables ----------------------------------------------------------------------------------------------------


def test_tables_of_a_file(tmp_path: Path) -> None:
    text = tables(measured(tmp_path / "runs.jsonl"))
    # one guess: 1.5 / (1.25 + 0.1); two: 1.8 / (0.4 + 0.2 x 1.5 + 0.4 x 1.75 + 0.2)
    for line in (
        "3 turns, 63 plain tokens. A step of several rows, in plain steps: 2 rows 1.50, 4 rows 2.00.",
        "drafter | prompts | τ | drafting a round | 1 guess | most guesses | allowed | speed-up | qa | rag | changed |",
        "| `two` | 3 | 1.75 | 10.0% | 10.0% | 20.0% (2) | 1.12 (2) | **1.20** | 1.20 | 1.20 | 0 |",
        "| `four` | 3 | 2.33 | 0.0% | – | – | – | **1.25** | 1.25 | 1.25 | 0 |",
        "| drafter | qa | rag |",
        "| `four` | 2.33 | 2.33 |",
        "| drafter | S_1 | S_2 | τ of 1 | τ of 2 |",
        "| `two` | 0.500 | 0.500 | 1.50 | 1.80 |",
    ):
        assert line in text
