"""Makes receipts with every instruction set and verifies each with every other, greedy and sampled, on random models of
every type of weights and on SmolLM2, and tells what differs and what verifying costs:

    python dev/check_receipts.py [--tokens 20000] [--models A,B,...] [--sets avx512,avx2]

An instruction set is a row, one that verifies a column: receipts that are not verified, of how many. Exit code 1 if one
is not though the arithmetic is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from unit.one_format import FORMATS, made_of  # noqa: E402
from wager.config import EngineConfig  # noqa: E402
from wager.kernels._native import Isa  # noqa: E402
from wager.kernels.cpu import ISAS  # noqa: E402
from wager.loading.load import load  # noqa: E402
from wager.models import random_models  # noqa: E402
from wager.models.tokenizer import Tokenizer  # noqa: E402
from wager.models.weights import Weights  # noqa: E402
from wager.receipts import Receipt, Verifier  # noqa: E402
from wager.types import Request, SamplingParams  # noqa: E402

REAL = "SmolLM2-135M-Instruct"


def receipts_of(model: str, isa: str, *, answers: int, tokens: int) -> list[Receipt]:
    """Half of them greedy, by an engine with that instruction set that guesses by n-grams."""
    os.environ["WAGER_ISA"] = isa
    engine = load(EngineConfig.from_options(model=model, drafter="ngram", max_context=2048, cache_tokens=16384))
    greedy = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [
        Request(str(at), range(30 + at, 90 + at), replace(greedy, temperature=0.8 * (at % 2), seed=at))  # type: ignore[arg-type]
        for at in range(answers)
    ]
    found = engine.generate(requests)
    return [Receipt.of(engine, request, each) for request, each in zip(requests, found, strict=True)]


def give(made: tuple[Weights, Tokenizer], _model: str) -> tuple[Weights, Tokenizer]:
    return made


def prompt_seconds(model: str, receipts: Sequence[Receipt]) -> list[float]:
    """What a prompt takes that is as long as each receipt's prompt and answer together."""
    config = EngineConfig.from_options(model=model, drafter="none", prefix_cache=False, max_context=2048)
    engine = load(config)
    requests = [
        Request(str(at), (*each.prompt, *each.output), SamplingParams(max_tokens=1)) for at, each in enumerate(receipts)
    ]
    return [each.stats.prefill_s for each in engine.generate(requests, concurrency=1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=20_000, help="verified by every instruction set together")
    parser.add_argument("--models", default=",".join([REAL, *FORMATS]))
    parser.add_argument("--sets", default=",".join(isa for isa in ISAS if Isa.has(isa)), help="instruction sets")
    arguments = parser.parse_args()
    os.environ["WAGER_CACHE"] = os.environ.get("WAGER_CACHE", tempfile.mkdtemp())
    models, sets = arguments.models.split(","), arguments.sets.split(",")
    each = max(1, round(arguments.tokens / len(models) / len(sets) / 400 / 2)) * 2
    tokens: Counter[tuple[str, str]] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    broken = 0
    for model in models:
        if model in FORMATS:
            random_models.make = partial(give, made_of(model))  # type: ignore[assignment]
        name = f"random:{model}" if model in FORMATS else model
        made = {isa: receipts_of(name, isa, answers=each, tokens=400) for isa in sets}
        for checker in sets:
            os.environ["WAGER_ISA"] = checker
            verifier = Verifier(made[checker][0], EngineConfig.from_options(model=name))
            for maker, receipts in made.items():
                for receipt in receipts:
                    found = verifier.verify(receipt)
                    tokens[maker, checker] += len(receipt.output)
                    refused[maker, checker] += not found.verified
                    same = receipt.arithmetic == verifier.engine.kernels.arithmetic
                    broken += same and not found.verified
                    if not found.verified:
                        print(f"{model}, {maker} by {checker}: {found.problems[0]}")
            if checker == sets[0]:
                verified = [verifier.verify(receipt).seconds for receipt in made[checker]]
                prompts = prompt_seconds(name, made[checker])
                ratio = median(a / b for a, b in zip(verified, prompts, strict=True))
                print(f"{model}: verifying takes {ratio:.2f} times a prompt of {len(receipt.prompt) + 400} tokens")
    count = each * len(models)
    print(
        f"{sum(tokens.values())} tokens verified; receipts that were not, of {count}, made by row, verified by column"
    )
    print(" " * 10 + "".join(f"{isa:>10}" for isa in sets))
    for maker in sets:
        print(f"{maker:>10}" + "".join(f"{refused[maker, checker]:>10}" for checker in sets))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
