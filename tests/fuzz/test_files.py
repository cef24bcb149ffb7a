"""Damaged model files: half a minute of mutants with fixed numbers. `python dev/fuzz_files.py` goes on for hours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import watchdog

MUTANTS = {"gguf": 400, "safetensors": 250, "config": 400, "shape": 400, "tokenizer": 250, "template": 150}


@pytest.mark.parametrize("kind", watchdog.KINDS)
def test_damaged_files_end_in_an_answer_or_a_typed_error(kind: str, tmp_path: Path) -> None:
    found = list(watchdog.run(((kind, number) for number in range(MUTANTS[kind])), tmp_path))
    outcomes = Counter(finding.outcome for finding in found)
    assert [str(finding) for finding in found if finding.outcome == "fault"] == []
    assert outcomes["answer"] > 0, "mutants that are all refused test the refusal only"
    assert outcomes["typed error"] > outcomes["answer"] / 10


@pytest.mark.parametrize("source", ["time.sleep(60)", "os.abort()", "raise ValueError"])
def test_hangs_and_crashes_are_found(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog is a check that can fail: a worker that hangs or dies is a fault."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys, os, time\n"
        "print(json.dumps({'ready': [['x', 'answer', '']]}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'done': 'x'}), flush=True)\n"
        f"    {source}\n"
    )
    monkeypatch.setattr(watchdog, "WORKER", worker)
    monkeypatch.setattr(watchdog, "LIMIT", 1.0)
    first, second = watchdog.run([("template", 0), ("template", 1)], tmp_path)
    assert (first.outcome, second.outcome) == ("fault", "fault")
    assert ("no end" in first.detail) == ("sleep" in source)
