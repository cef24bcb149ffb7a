"""Trains an EAGLE-3 head for a toy model and answers with it: every step of the real thing, in a minute.

    pip install "wager[train]"
    python examples/train_a_head.py [MODEL] [STEPS]

For a head that pays, give a real model, its own prompts and thousands of steps: docs/train.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import wager

MODEL = sys.argv[1] if len(sys.argv) > 1 else "random:llama:tiny"
STEPS = sys.argv[2] if len(sys.argv) > 2 else "150"


def train(folder: Path) -> Path:
    """A head in `folder`, trained on the model's own answers."""
    prompts = folder / "prompts.jsonl"
    rows = [json.dumps({"prompt": f"Count from {n} to {n + 9}."}) for n in range(8)]
    prompts.write_text("\n".join(rows), encoding="utf-8")
    head = folder / "head"
    command = [sys.executable, "-m", "wager.cli", "train", "--kind", "eagle3", "--model", MODEL]
    command += ["--prompts", str(prompts), "--answer-tokens", "24", "--steps", STEPS, "--batch", "128"]
    done = subprocess.run([*command, "--vocabulary", "256", "--output", str(head)], check=False)
    if done.returncode:  # it has said why
        raise SystemExit(done.returncode)
    return head


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        head = train(Path(folder))
        with wager.LLM(MODEL, drafter=f"eagle3:{head}", depth=3) as llm:
            question = [{"role": "user", "content": "Count from 3 to 12."}]
            answer = llm.chat(question, wager.SamplingParams(max_tokens=24))
            print(f"{answer.stats.accepted} of {answer.stats.drafted} guesses accepted, of an answer that it was shown")


if __name__ == "__main__":
    main()
