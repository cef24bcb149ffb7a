"""What learning from traffic (--learn) brings, and what it costs where nothing repeats.

    python dev/bench_learning.py PROMPTS [--model M] [--drafter suffix] [--requests 100] [--kinds 10]
        [--max-tokens 128] [--unrelated FOLDER] [--json PATH]

The curve: the first prompts are asked, then again with other numbers and names: tau after 0, --kinds and --requests
learned requests, and after a restart, beside the same engine without --learn. Answers are measured from the corpus
alone: what drafters remember is forgotten before.

The cost: every prompt once, by an engine that learns and one that does not, in turns, with one copy of the weights; the
median ratio of decoding seconds. --unrelated is a folder that was learned in, of other texts.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import wager
from wager.loading.load import LoadedEngine, load
from wager.prompts import read_prompts, spread
from wager.terminal.flags import Framing
from wager.types import Completion, Request, SamplingParams

_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}")
_NUMBER = re.compile(r"\d+")


def varied(text: str, pool: Sequence[str], seed: int) -> str:
    """The text with other numbers of as many digits, and other names, the same one for the same."""
    rng = random.Random(f"{seed} {text}")
    names = {name: rng.choice(pool) for name in sorted(set(_NAME.findall(text)))}
    text = _NAME.sub(lambda match: names[match[0]], text)
    return _NUMBER.sub(lambda match: "".join(rng.choice("123456789") for _ in match[0]), text)


class Measurement:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.prompts = spread(read_prompts(options.prompts), options.requests)
        self.pool = sorted({name for prompt in self.prompts for name in _NAME.findall(prompt.text)})
        config = wager.EngineConfig.from_options(
            model=options.model, drafter=options.drafter, max_context=2048, cache_tokens=8192, prefix_cache=False
        )
        self.plain = load(config)

    def learning(self, folder: str) -> LoadedEngine:
        return load(self.plain.target.config.with_options(learn=folder), target=self.plain.target)

    def ask(self, engine: LoadedEngine, text: str) -> Completion:
        params = SamplingParams(max_tokens=self.options.max_tokens, temperature=0)
        tokens = Framing().encode(engine.tokenizer, text)
        [completion] = engine.generate([Request("r", tuple(tokens), params)])
        return completion

    def tau(self, engine: LoadedEngine, seed: int) -> float:
        """Of the kinds with other numbers and names; nothing is learned of them."""
        learned, engine.learned = engine.learned, None
        if learned is not None:
            learned.seal()
        tokens = rounds = 0
        for prompt in self.prompts[: self.options.kinds]:
            engine.forget_requests()
            answer = self.ask(engine, varied(prompt.text, self.pool, seed))
            tokens += len(answer.token_ids)
            rounds += answer.stats.rounds
        engine.learned = learned
        return tokens / rounds

    def curve(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"learning": [], "not": [self.tau(self.plain, 0)]}
        with tempfile.TemporaryDirectory() as folder:
            engine, asked = self.learning(folder), 0
            for count in (0, self.options.kinds, len(self.prompts)):
                for prompt in self.prompts[asked:count]:
                    self.ask(engine, prompt.text)
                asked = max(asked, count)
                found["learning"].append(self.tau(engine, 0))
            engine.close()
            engine = self.learning(folder)
            found["learning"].append(self.tau(engine, 0))
            engine.close()
        return found

    def cost(self, folder: str) -> dict[str, float]:
        engine = self.learning(folder)
        ratios = []
        for number, prompt in enumerate(self.prompts):
            pair = [self.plain, engine] if number % 2 else [engine, self.plain]
            answers = {each is engine: self.ask(each, prompt.text) for each in pair}
            if answers[True].token_ids != answers[False].token_ids:
                raise SystemExit(f"{prompt.id}: another text")
            ratios.append(answers[True].stats.decode_s / answers[False].stats.decode_s)
        engine.close()
        quarters = sorted(ratios)
        return {
            "median": median(ratios),
            "lower_quartile": quarters[len(quarters) // 4],
            "upper_quartile": quarters[3 * len(quarters) // 4],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kinds", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--unrelated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measurement = Measurement(options)
    with tempfile.TemporaryDirectory() as empty:
        found = {"cost": measurement.cost(options.unrelated or empty), "tau": measurement.curve()}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
