"""Microseconds that a grammar takes for a token: its mask, what it forces, and the step to the next token.

python dev/bench_grammars.py [MODEL]: along fixed texts, no model is run. Two turns: the second finds the grammar warm.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from wager.constrain.compiler import GrammarCompiler
from wager.models.hub import resolve
from wager.models.tokenizer import Tokenizer
from wager.types import Grammar

R = TypeVar("R")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
PERSON = {"name": "Ada Lovelace, Countess of something", "age": 36, "city": "London, where it rains"}
CASES = [
    ("schema", Grammar.json_schema(SCHEMA), json.dumps(PERSON)),
    (
        "any object",
        Grammar.json_object(),
        json.dumps({"a": [1, 2, {"b": "some text"}], "c": None, "d": "stormy nights"}),
    ),
    ("expression", Grammar.regex(r"[A-Z][a-z]+( [a-z]+){3,30}\."), "It was a dark and stormy night and the rain fell."),
    ("any whitespace", Grammar.json_schema(SCHEMA, any_whitespace=True), json.dumps(PERSON, indent=2)),
]


def timed(taken: list[float], call: Callable[..., R], *arguments: object) -> R:
    begin = time.perf_counter()
    result = call(*arguments)
    taken.append(1e6 * (time.perf_counter() - begin))
    return result


def main(model: str) -> None:
    tokenizer = Tokenizer.load(resolve(model))
    compiler = GrammarCompiler(tokenizer)
    begin = time.process_time()
    compiler.compile(Grammar.choice(["first"]))
    print(f"first grammar: {time.process_time() - begin:.2f} s of CPU time ({tokenizer.vocab_size} tokens)")
    for name, grammar, text in CASES:
        begin = time.process_time()
        compiled = compiler.compile(grammar).compiled
        print(f"{name}: compiled in {1e3 * (time.process_time() - begin):.1f} ms")
        for turn in ("cold", "warm"):
            assert compiled is not None
            state = compiled.start()
            masks: list[float] = []
            forced: list[float] = []
            steps: list[float] = []
            for token in tokenizer.encode_text(text):
                timed(forced, state.forced, ())
                allowed = timed(masks, state.allowed, ())
                assert allowed is not None and token in allowed
                timed(steps, state.append, [token])
                state.complete()
            columns = [("mask", masks), ("forced", forced), ("append", steps)]
            shown = [
                f"{part} {statistics.median(us):.0f} / {statistics.mean(us):.0f} / {max(us):.0f}"
                for part, us in columns
            ]
            print(f"  {turn}: {len(masks)} tokens, us median / mean / max: {', '.join(shown)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
