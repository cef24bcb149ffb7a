"""The script that records traces writes the format that `wager replay` reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from wager.economics.simulation.traces import RecordedTraces

SCRIPT = Path(__file__).parents[2] / "dev" / "record_trace.py"


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "trace.jsonl"
    prompts.write_text(json.dumps({"id": 1, "category": "echo", "prompt": "la la la la"}) + "\n")
    options = ["--model", "random:llama:tiny", "--drafter", "ngram", "--max-tokens", "20"]
    subprocess.run([sys.executable, str(SCRIPT), str(prompts), str(out), *options], check=True, capture_output=True)
    traces = RecordedTraces.read(out)
    assert traces.request(0).output_tokens == 20
    assert list(traces.request(0).drafts) == ["ngram"]
    assert traces.max_depths()["ngram"] > 0
