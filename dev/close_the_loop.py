"""Whether `wager plan` predicts what is measured: calibrate -> acceptance -> plan -> measure at fixed depths, on one
machine, with one table at the end.

    python dev/close_the_loop.py PROMPTS [--model MODEL] [--drafter ngram] [--prompts 36] [--loads 1,4,16]
        [--depths 1,2,3,5,7,11,15] [--temperatures 0,0.8] [--seconds 60] [--threads N] [--calibration FILE]
        [--json PATH]

`wager calibrate`, `wager acceptance` and `wager plan` run as a user would call them (the calibration is stored in a
temporary folder). Then all depths and plain decoding serve the same prompts in turns on one loaded model, so that a
machine that changes its speed affects all alike. Compared are the steps that `plan` predicts: those in which all
requests of the load decode and no prompt is computed (`decode_steps` of `wager bench`). Intervals are those of the
ratio over turns (bootstrap, 95 %). About a quarter of an hour with the defaults; progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wager.bench.measure import DecodeSteps, measure
from wager.cli.measuring import to_requests
from wager.config import DEFAULT_MODEL, EngineConfig
from wager.loading.load import LoadedEngine, load
from wager.models import hub
from wager.prompts import Prompt, read_prompts, spread
from wager.terminal.flags import Framing
from wager.types import SamplingParams

WAVES = 3
"""Requests of a turn, in batches: enough that the batch is full most of the time."""

MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Outcome:
    """One depth at one load and temperature: speed-up over plain decoding as predicted and as measured."""

    load: int
    temperature: float
    depth: int
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def wager(verb: str, *arguments: object, cache: str | None = None, **options: object) -> str:
    """Run a command of wager and return its stdout; options that are None are left out."""
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items() if value is not None]
    words = [verb, *map(str, arguments), *(word for option in given for word in option)]
    say(f"wager {' '.join(words)}")
    environment = {**os.environ, "WAGER_CACHE": cache} if cache else None
    call = [sys.executable, "-m", "wager.cli", *words]
    return subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def say(text: str) -> None:
    sys.stderr.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")


def predict(
    args: argparse.Namespace, folder: Path, calibration: Path, temperature: float
) -> dict[int, dict[int, float]]:
    """Load -> depth -> predicted speed-up, from `wager acceptance` and `wager plan`."""
    file = folder / f"acceptance-{temperature:g}.json"
    wager(
        "acceptance",
        args.file,
        model=args.model,
        drafter=args.drafter,
        limit=args.prompts,
        max_tokens=MAX_TOKENS,
        temperature=temperature,
        output=file,
    )
    acceptance = json.loads(file.read_text())
    say(
        f"temperature {temperature:g}: alpha {acceptance['alpha']:.3f}, coverage {acceptance['coverage']:.0%}, "
        f"tau {acceptance['tau']:.3f} at depth {acceptance['depth']}"
    )
    planned = wager(
        "plan",
        model=args.model,
        hardware=calibration,
        acceptance=file,
        batch=args.loads,
        context=round(acceptance["context"]),
        json="-",
    )
    return {
        point["batch"]: {outcome["depth"]: outcome["speedup"] for outcome in point["depths"]}
        for point in json.loads(planned)["points"]
    }


class Measured:
    """Engines at several depths on one loaded model, and the decode steps of each in every turn."""

    def __init__(self, args: argparse.Namespace, depths: Sequence[int]) -> None:
        options: dict[str, Any] = {
            "model": args.model,
            "drafter": args.drafter,
            "prefix_cache": False,
            "threads": args.threads,
        }
        first = load(EngineConfig.from_options(**options, depth=max(depths)))
        self.engines: dict[str, LoadedEngine] = {
            str(depth): load(EngineConfig.from_options(**options, depth=depth), target=first.target)
            for depth in (0, *depths)
        }

    def turns(self, prompts: Sequence[Prompt], *, load: int, params: SamplingParams) -> list[dict[str, DecodeSteps]]:
        """Serve the prompts `load` at a time, a turn of each engine after the other."""
        requests = to_requests(prompts, self.engines["0"].tokenizer, framing=Framing(), params=params)
        size = 1 if load == 1 else WAVES * load
        groups = [requests[start : start + size] for start in range(0, len(requests), size)]
        taken: list[dict[str, DecodeSteps]] = []
        for number, group in enumerate(groups):
            if len(group) < load:
                continue
            steps = {name: DecodeSteps(load) for name in self.engines}
            for name, engine in self.engines.items():
                engine.on_step = steps[name].add
            order = list(self.engines)[:: 1 if number % 2 else -1]
            measure(
                {name: self.engines[name] for name in order}, group, concurrency=load, repeats=1 if load < 16 else 2
            )
            taken.append(steps)
            say(f"load {load}, temperature {params.temperature:g}: turn {number + 1} of {len(groups)}")
        return taken


def speedup(turns: Sequence[Mapping[str, DecodeSteps]], depth: int) -> tuple[float, float, float]:
    """Tokens a second over those of plain decoding, all turns together, with its interval over turns."""
    sums = np.array(
        [
            [
                turn[name].tokens if value == "tokens" else turn[name].seconds
                for name in (str(depth), "0")
                for value in ("tokens", "seconds")
            ]
            for turn in turns
        ]
    )

    def ratio(rows: Any) -> float:
        tokens, seconds, plain_tokens, plain_seconds = rows.sum(0)
        return float(tokens / seconds / (plain_tokens / plain_seconds))

    rng = np.random.default_rng(0)
    resampled = [ratio(sums[rng.integers(0, len(sums), len(sums))]) for _ in range(1000)]
    low, high = np.quantile(resampled, (0.025, 0.975))
    return ratio(sums), float(low), float(high)


def line(o: Outcome) -> str:
    """A row of the first table."""
    measured = f"{o.measured:.2f} ({o.low:.2f} to {o.high:.2f})"
    return f"| {o.load} | {o.temperature:g} | {o.depth} | {o.predicted:.2f} | {measured} | {o.error:+.1%} |"


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per load, temperature and depth, then how well the best depth was predicted."""
    lines = ["| load | temperature | depth | predicted | measured (95 %) | error |", "|---|---|---|---|---|---|"]
    lines += map(line, outcomes)
    lines += [
        "",
        "| load | temperature | best depth, predicted | measured | predicted one, measured | lost |",
        "|---|---|---|---|---|---|",
    ]
    for load_, temperature in dict.fromkeys((o.load, o.temperature) for o in outcomes):
        group = [o for o in outcomes if (o.load, o.temperature) == (load_, temperature)]
        plain = Outcome(load_, temperature, 0, 1.0, 1.0, 1.0, 1.0)
        planned = max([plain, *group], key=lambda o: o.predicted)
        best = max([plain, *group], key=lambda o: o.measured)
        lines.append(
            f"| {load_} | {temperature:g} | {planned.depth} ({planned.predicted:.2f}) | {best.depth} "
            f"({best.measured:.2f}) | {planned.measured:.2f} | {1 - planned.measured / best.measured:.1%} |"
        )
    errors = sorted(abs(o.error) for o in outcomes)
    lines.append(
        f"\nErrors: {errors[len(errors) // 2]:.1%} (median), {errors[-1]:.1%} (largest), "
        f"{sum(error < 0.1 for error in errors)} of {len(errors)} below 10 %."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="PROMPTS")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--prompts", type=int, default=36)
    parser.add_argument("--loads", default="1,4,16")
    parser.add_argument("--depths", default="1,2,3,5,7,11,15")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = None if args.model.startswith("random:") else hub.find(args.model)
    args.model = args.model if found is None else str(found)
    depths = [int(word) for word in args.depths.split(",")]
    prompts = spread(read_prompts(args.file), args.prompts)
    if len(prompts) < max(int(word) for word in args.loads.split(",")):
        parser.error(f"{len(prompts)} prompts do not fill the largest of the loads {args.loads}")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration = args.calibration or folder / "calibration.json"
        if args.calibration is None:
            given = {"model": args.model, "drafter": args.drafter, "seconds": args.seconds, "threads": args.threads}
            wager("calibrate", **given, json=calibration, cache=name)
        temperatures = [float(word) for word in args.temperatures.split(",")]
        predicted = {temperature: predict(args, folder, calibration, temperature) for temperature in temperatures}
        engines = Measured(args, depths)
        for load_ in (int(word) for word in args.loads.split(",")):
            for temperature in temperatures:
                params = SamplingParams(MAX_TOKENS, temperature=temperature, seed=0)
                turns = engines.turns(prompts, load=load_, params=params)
                group = [
                    Outcome(load_, temperature, depth, predicted[temperature][load_][depth], *speedup(turns, depth))
                    for depth in depths
                ]
                outcomes += group
                say("\n".join(["so far:", *map(line, group)]))
                if args.json:
                    args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print(table(outcomes))


if __name__ == "__main__":
    main()
