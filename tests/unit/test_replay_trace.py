"""The script that records traces records what `wager replay` reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from wager.economics.simulation.workload import Recorded

SCRIPT = Path(__file__).parents[2] / "dev" / "record_trace.py"


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "trace.jsonl"
    prompts.write_text(json.dumps({"id": 1, "category": "echo", "prompt": "la la la la"}) + "\n")
    options = ["--model", "random:llama:tiny", "--drafter", "ngram", "--max-tokens", "20"]
    subprocess.run([sys.executable, str(SCRIPT), str(prompts), str(out), *options], check=True, capture_output=True)
    world = Recorded.read(out)
    assert world.text(0).output == 20
    assert list(world.text(0).guesses) == ["ngram"]
    assert world.deepest()["ngram"] > 0
