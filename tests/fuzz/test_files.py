"""Damaged model files: mutants with fixed numbers. `python dev/fuzz_files.py` goes on for hours.

A mutant that hangs ends the run by pytest's own limit, with its stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import fuzz_models
import pytest
from examine import ANSWER, FAULT, MUTANTS, TYPED, examine, examine_mutant


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Undamaged they answer."""
    made = fuzz_models.build(tmp_path_factory.mktemp("fuzz") / "bases")
    assert {examine(path).outcome for path in made.values()} == {ANSWER}
    return made


@pytest.mark.parametrize(("kind", "share"), [("gguf", 20), *((kind, 1) for kind in MUTANTS)])
def test_damaged_files_end_in_an_answer_or_a_typed_error(
    kind: str, share: int, models: Mapping[str, Path], tmp_path: Path
) -> None:
    found = [(number, *examine_mutant(kind, number, models, tmp_path)) for number in range(MUTANTS[kind] // share)]
    assert [each for each in found if each[1].outcome == FAULT] == []
    outcomes = Counter(examined.outcome for _, examined, _ in found)
    if share == 1:
        assert outcomes[ANSWER] > 0, "mutants that are all refused test the refusal only"
        assert outcomes[TYPED] > outcomes[ANSWER] / 10
