"""A conversation in the terminal, streamed. Earlier turns are not computed again.

    python examples/chat.py [MODEL]

An empty line, or the end of the input, ends it.
"""

from __future__ import annotations

import sys

import wager

MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct"


def main() -> None:
    messages: list[dict[str, str]] = []
    with wager.LLM(MODEL) as llm:
        print("> ", end="", flush=True)
        for line in sys.stdin:
            if not line.strip():
                break
            messages.append({"role": "user", "content": line.strip()})
            stream = llm.stream(messages, wager.SamplingParams(max_tokens=200, temperature=0.7))
            for delta in stream:
                print(delta.text, end="", flush=True)
            [answer] = stream.completions()
            messages.append({"role": "assistant", "content": answer.text})
            print(f"\n({answer.stats.mean_acceptance_length:.2f} tokens a pass)\n> ", end="", flush=True)


if __name__ == "__main__":
    main()
