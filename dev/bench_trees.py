"""Chains and trees at equal verified rows: tau, the bonus token included, by drafter, guesses and temperature.

    python dev/bench_trees.py PROMPTS [--limit 12] [--tokens 40] [--depths 3,7] DRAFTER [DRAFTER ...]

Each drafter makes the same number of guesses in every round, as a chain or as a tree. Machine and load do not matter:
only rounds are counted, so the figures are the same anywhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import wager
from wager.cli.bench import to_requests
from wager.loading.load import load
from wager.prompts import read_prompts, spread
from wager.terminal.flags import Framing
from wager.types import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--model", default=wager.EngineConfig().model.model)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--depths", default="3,7")
    options = parser.parse_args()
    plain = load(wager.EngineConfig.from_options(model=options.model, drafter="none", prefix_cache=False))
    prompts = spread(read_prompts(options.prompts), options.limit)
    for drafter in options.drafters:
        for depth in map(int, options.depths.split(",")):
            config = plain.target.config.with_options(drafter=drafter, depth=depth)
            engine = load(config, target=plain.target)
            for temperature in (0.0, 0.8):
                params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=1)
                requests = to_requests(prompts, engine.tokenizer, framing=Framing(), params=params)
                stats = [each.stats for each in engine.generate(requests, concurrency=4)]
                rounds, drafted = (sum(getattr(each, name) for each in stats) for name in ("rounds", "drafted"))
                tau = sum(each.completion_tokens for each in stats) / rounds
                print(f"{drafter:40} depth {depth} T {temperature}: tau {tau:.3f}, {drafted / rounds:.2f} guesses each")


if __name__ == "__main__":
    main()
