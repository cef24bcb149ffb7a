"""Many prompts at once, as JSON lines: each answer with its tokens, passes and accepted guesses.

    python examples/batch.py [MODEL] < prompts.txt > answers.jsonl

One prompt a line; without input, three that are built in. The prompts run together in one batch: an answer is the same
as alone, and the policy decides at every step how much speculation the batch leaves room for.
"""

from __future__ import annotations

import json
import sys

import wager

MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct"
BUILT_IN = ["Count from one to ten.", "Name three rivers.", "Say the alphabet."]


def main() -> None:
    given = [] if sys.stdin.isatty() else [line.strip() for line in sys.stdin]
    prompts = [line for line in given if line] or BUILT_IN
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with wager.LLM(MODEL) as llm:
        answers = llm.chat(conversations, wager.SamplingParams(max_tokens=64))
    for prompt, answer in zip(prompts, answers, strict=True):
        stats = answer.stats
        row = {
            "prompt": prompt,
            "answer": answer.text,
            "finish_reason": answer.finish_reason,
            "tokens": stats.completion_tokens,
            "passes": stats.rounds,
            "accepted": stats.accepted,
        }
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
