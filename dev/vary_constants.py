"""What happens to the adaptive policy if one of its constants is halved or doubled.

    python dev/vary_constants.py [--only WORD] [--skip WORD,...] [--part I/N] [--replays WORD] [--list] [--rows FILE]

The constants are the numbers at the top of the modules of economics and economics/policy; what they are for, and in
what unit, is the comment beside them or the line below. Each is set to half and to twice its value, and a fixed set of
small replays is run: tokens a second against those with the value as it is. The policy's own time is not charged, so
that the figures are the same every time; a replay is chaotic, so differences under 0.3 % are noise. Constants that
bound what is rare are expected to show nothing here.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from wager.economics.acceptance import DFLASH_SURVIVAL, MTP_SURVIVAL
from wager.economics.options import THROUGHPUT, Objective
from wager.economics.policy.adaptive import Adaptive
from wager.economics.policy.base import DrafterCapabilities
from wager.economics.surface import DraftCurve, LatencySurface
from wager.simulation.server import SimulatedServer, Workload
from wager.simulation.traces import RequestTrace, SyntheticDrafter, SyntheticTraces, TraceSource

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from economics.published import PublishedLatency

SOURCE = Path(__file__).resolve().parents[1] / "src" / "wager" / "economics"
FILES = ["*.py", "policy/*.py"]
NOISE = 0.003

SCORED, SILENT = SyntheticDrafter(MTP_SURVIVAL), SyntheticDrafter(MTP_SURVIVAL, score_sd=None)
BLOCK = SyntheticDrafter(DFLASH_SURVIVAL)


@dataclass(frozen=True, slots=True)
class Constant:
    module: str
    name: str
    value: float
    why: str


def constants() -> Iterator[Constant]:
    """The numbers at the top of the modules, with the comment beside them."""
    for path in sorted(path for pattern in FILES for path in SOURCE.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        module = ".".join(["wager", "economics", *path.relative_to(SOURCE).with_suffix("").parts])
        body = ast.parse(text).body
        for node, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
                target = node.targets[0]
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = (
                    node.value.elts
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [node.value]
                )
                why = lines[node.end_lineno - 1 if node.end_lineno else 0].partition("#")[2].strip()
                if not why and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    why = " ".join(str(below.value.value).split())
                for name, value in zip(names, values, strict=False):
                    if (
                        isinstance(name, ast.Name)
                        and isinstance(value, ast.Constant)
                        and type(value.value) in (int, float)
                    ):
                        yield Constant(module, name.id, value.value, why)


class Changing(SyntheticTraces):
    """Drafts that are hardly ever accepted, and after some requests mostly are."""

    def request(self, number: int) -> RequestTrace:
        source = SyntheticTraces(
            {"d": SyntheticDrafter(tuple((0.2 if number < 12 else 0.85) ** k for k in range(1, 7)))}, output_tokens=300
        )
        return source.request(number)


def believed(latency: PublishedLatency, factor: float) -> LatencySurface:
    """A measured surface whose rows have the wrong price."""
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    plain = latency.seconds(1, 1, 500)
    seconds = [plain + factor * (latency.seconds(count, 1, 500) - plain) for count in rows]
    return LatencySurface(rows, seconds, drafters={"d": DraftCurve.unmeasured()})


class Renamed(PublishedLatency):
    """The drafter `d` takes what `mtp` does."""

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        return super().draft_seconds("mtp" if drafter == "d" else drafter, requests, depth)


def rate(traces: TraceSource, users: int, steps: int, *, model: Any = None, objective: Objective = THROUGHPUT) -> float:
    latency = Renamed()
    drafters = {
        name: DrafterCapabilities(depth, stops_early=name != "dflash") for name, depth in traces.max_depths().items()
    }
    policy = Adaptive(model or latency, drafters=drafters, objective=objective)
    load = Workload(concurrency=users, rounds=users * steps)
    return SimulatedServer(traces, latency, policy=policy, workload=load).run().throughput


def replays(word: str) -> Mapping[str, float]:
    """Tokens a second in each of the replays whose name contains `word`."""
    curve, moving = {"d": SCORED}, Changing({"d": SyntheticDrafter((0.5,) * 6)})
    each: Mapping[str, Callable[[], float]] = {
        "head, 1 user": lambda: rate(SyntheticTraces(curve), 1, 1500),
        "head, 8": lambda: rate(SyntheticTraces(curve), 8, 250),
        "head, 200": lambda: rate(SyntheticTraces(curve, output_tokens=200), 200, 50),
        "block, 8": lambda: rate(SyntheticTraces({"dflash": BLOCK}), 8, 250),
        "no scores, 8": lambda: rate(SyntheticTraces({"d": SILENT}), 8, 250),
        "two drafters, 8": lambda: rate(SyntheticTraces({"d": SCORED, "dflash": BLOCK}), 8, 150),
        "acceptance changes, 4": lambda: rate(moving, 4, 900),
        "rows believed cheap, 4": lambda: rate(SyntheticTraces(curve), 4, 350, model=believed(PublishedLatency(), 0.4)),
        "rows believed dear, 4": lambda: rate(SyntheticTraces(curve), 4, 350, model=believed(PublishedLatency(), 2.5)),
        "slo, 8": lambda: rate(SyntheticTraces(curve), 8, 200, objective=Objective("slo", 1.6e-3)),
    }
    return {name: run() for name, run in each.items() if word in name}


def set_everywhere(constant: Constant, value: float) -> None:
    """In its module, and where it was imported from there."""
    for module in [module for name, module in sys.modules.items() if name.startswith("wager.economics")]:
        if hasattr(module, constant.name) and (module.__name__ == constant.module or not constant.name.startswith("_")):
            setattr(module, constant.name, value)


def varied(constant: Constant, factor: float, before: Mapping[str, float], word: str) -> str:
    """The greatest loss and the greatest gain over the replays, in per cent; empty within the noise."""
    value = constant.value * factor
    set_everywhere(
        constant, type(constant.value)(max(1, value) if isinstance(constant.value, int) and constant.value else value)
    )
    try:
        after = replays(word)
    except Exception as error:
        return f"fails: {type(error).__name__}"
    finally:
        set_everywhere(constant, constant.value)
    change = {name: after[name] / before[name] - 1 for name in before}
    worst, best = min(change, key=change.__getitem__), max(change, key=change.__getitem__)
    parts = [f"{100 * change[name]:+.1f} % ({name})" for name in (worst, best) if abs(change[name]) > NOISE]
    return "; ".join(dict.fromkeys(parts)) + (f"; mean {100 * np.mean(list(change.values())):+.1f} %" if parts else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="constants whose name or module contains this")
    parser.add_argument("--skip", default="", help="words; constants that contain one are left out")
    parser.add_argument("--replays", default="", help="replays whose name contains this: 'believed' learn step times")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th of them, from number I")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rows", type=Path, help="append the table's rows to this file")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    skipped = [word for word in args.skip.split(",") if word]
    chosen = [
        each
        for each in constants()
        if args.only in f"{each.module}.{each.name}"
        and not any(word in f"{each.module}.{each.name}" for word in skipped)
    ][part::parts]
    for each in chosen:
        import_module(each.module)
    if args.list:
        for each in chosen:
            print(f"{each.module.removeprefix('wager.economics.')}.{each.name} = {each.value}  # {each.why}")
        print(f"{len(chosen)} constants")
        return
    before = replays(args.replays)
    print({name: round(value, 1) for name, value in before.items()}, file=sys.stderr)
    for each in chosen:
        half, twice = (varied(each, factor, before, args.replays) or "-" for factor in (0.5, 2.0))
        place = each.module.removeprefix("wager.economics.")
        row = f"| {place} | `{each.name}` = {each.value:g} | {each.why} | {half} | {twice} |"
        print(row, flush=True)
        if args.rows:
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(row + "\n")


if __name__ == "__main__":
    main()
