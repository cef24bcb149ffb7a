"""`wager replay`: policies on a simulated server, from recorded answers or published survival curves. No model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.cli import console, flags
from wager.errors import UsageError

if TYPE_CHECKING:
    from wager.economics.simulation.comparison import ReplayPoint, ReplaySetting
    from wager.economics.simulation.server import Workload
    from wager.economics.simulation.workload import World

_DEFAULT_CONCURRENCY = "1,4,16,64,256"
_PROMPT, _OUTPUT = 1, 1024


@click.command("replay")
@click.argument("trace", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--policy", "policies", multiple=True, metavar="NAME",
              help="none, fixed:K, threshold[:P] or adaptive; repeat it to compare. The best fixed depth is "
              "always found too.  [default: none, threshold, adaptive]")  # fmt: skip
@click.option("--concurrency", metavar="N,...", help="Users who ask again as soon as they are answered.  "
              f"[default: {_DEFAULT_CONCURRENCY}]")  # fmt: skip
@click.option("--rate", metavar="R,...", help="Requests a second that arrive on their own, instead of --concurrency.")
@click.option("--curve", "curves", multiple=True, metavar="NAME|P|FILE",
              help="Survival of a made-up drafter: mtp or dflash (published), a constant rate, or a JSON file as in "
              "`wager plan --acceptance`. Repeat it to offer several.  [default: mtp]")  # fmt: skip
@click.option("--model", metavar="MODEL", help="Price steps of this model, as `wager plan` does, on --hardware. "
              "Without both: Qwen3.6-35B-A3B on a B200, as published.")  # fmt: skip
@click.option("--hardware", metavar="NAME", help="A GPU by name, cpu, or a JSON file; see `wager plan`.")
@click.option("--drafter-shape", "shape", metavar="SHAPE", help="What guessing costs there: free, mtp, block[:N] or "
              "model:NAME; see `wager plan`.  [default: mtp]")  # fmt: skip
@click.option("--tp", type=int, default=1, show_default=True, metavar="N", help="Devices that split every matrix.")
@click.option("--ep", type=int, default=1, show_default=True, metavar="N",
              help="Ranks that split the experts, each with the load that is given.")  # fmt: skip
@click.option("--locality", type=float, default=1.0, show_default=True, metavar="X",
              help="T tokens of one request hit as many experts as T^X unrelated ones.")  # fmt: skip
@click.option("--objective", default="throughput", show_default=True, metavar="GOAL",
              help="Of adaptive: throughput, latency, or slo:TIME (per token, such as slo:20ms).")  # fmt: skip
@click.option("--prompt", type=click.IntRange(min=1, max=10_000_000), metavar="N",
              help=f"Prompt tokens of made-up requests.  [default: {_PROMPT}]")  # fmt: skip
@click.option("--output", type=click.IntRange(min=1, max=100_000), metavar="N",
              help=f"Answer tokens of made-up requests.  [default: {_OUTPUT}]")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=20_000, show_default=True, metavar="N",
              help="Passes to simulate per policy and load, summed over made-up requests.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Of made-up texts and arrivals.")  # fmt: skip
@flags.json_flag
def command(*, trace: Path | None, policies: tuple[str, ...], json_path: Path | None, **values: Any) -> None:
    """Compare policies on a simulated server.

    TRACE holds what drafters would have guessed along recorded answers (docs/policy.md has the format). Without it
    texts are made up whose guesses survive as in published curves. Every policy meets the same texts at the same
    prices; the clock moves by what each step would take.
    """
    from wager.economics.simulation import comparison as replay

    console.check_writable(json_path)
    chosen = list(policies) or ["none", "threshold", "adaptive"]
    setting = _setting(trace, values)
    names = list(dict.fromkeys([*replay.fixed(setting), *chosen]))
    loads = _loads(setting, values)
    with console.meter("simulations") as update:
        done = 0

        def count(_point: ReplayPoint) -> None:
            nonlocal done
            done += 1
            update("Simulating", done, len(names) * len(loads))

        points = replay.compare(setting, names, loads, on_point=count)
    if json_path:
        kept = {key: value for key, value in values.items() if value is not None}
        console.write_json({"setting": {"trace": str(trace or ""), **kept}, "points": [p.as_dict() for p in points]},
                           json_path)  # fmt: skip
    if str(json_path) != "-":
        _show(points, chosen)


# ---- what the flags mean --------------------------------------------------------------------------------------------


def _setting(trace: Path | None, values: dict[str, Any]) -> ReplaySetting:
    from wager.economics.policy.objective import parse_objective
    from wager.economics.simulation.comparison import ReplaySetting
    from wager.economics.simulation.workload import Recorded

    world: World = Recorded.read(trace) if trace else _made_up(values)
    if trace and values["curves"]:
        raise UsageError("A trace brings its own acceptance, so --curve says nothing.", "Leave one of them out.")
    for flag in ("prompt", "output"):
        if trace and values[flag] is not None:
            raise UsageError(f"A trace brings its own lengths, so --{flag} says nothing.", "Leave one of them out.")
    surface, devices = _prices(world, values)
    return ReplaySetting(world, surface, parse_objective(values["objective"]), devices)


def _made_up(values: dict[str, Any]) -> World:
    from wager.cli import plan_inputs
    from wager.economics.simulation.workload import Curve, Synthetic
    from wager.economics.survival import CURVES

    curves = {}
    for word in values["curves"] or ("mtp",):
        if word in CURVES:
            curves[word] = Curve(CURVES[word])
            continue
        [rates] = plan_inputs.acceptances(word)
        alive = rates.alive(8 if rates.most is None else rates.most)
        curves[rates.label] = Curve(tuple(max(1e-4, chance) for chance in alive))
    return Synthetic(
        curves, prompt=values["prompt"] or _PROMPT, output=values["output"] or _OUTPUT, seed=values["seed"]
    )


def _prices(world: World, values: dict[str, Any]) -> tuple[Any, int]:
    from wager.cli import plan_inputs
    from wager.economics.survival import EnvelopeSurface

    model, hardware = values["model"], values["hardware"]
    if (model is None) != (hardware is None):
        raise UsageError("--model and --hardware go together.", "Give both, or none for the published prices.")
    if model is None:
        for flag, unset in (("shape", None), ("tp", 1), ("ep", 1), ("locality", 1.0)):
            if values[flag] != unset:
                name = {"shape": "drafter-shape"}.get(flag, flag)
                raise UsageError(f"--{name} says nothing about the published prices.", "Give --model and --hardware.")
        return EnvelopeSurface(), 1
    from wager.economics.costmodel.experts import ExpertRouting
    from wager.economics.costmodel.paper import PaperSurface
    from wager.economics.costmodel.roofline import CostModel

    cost = CostModel(plan_inputs.find(model), plan_inputs.find_hardware(hardware),
                     routing=ExpertRouting(locality=values["locality"]), tp=values["tp"], ep=values["ep"])  # fmt: skip
    drafter = plan_inputs.drafter(cost, shape=values["shape"], price=None)
    first = world.text(0)
    context = first.prompt + first.output / 2
    return PaperSurface(cost, drafters=dict.fromkeys(world.deepest(), drafter), context=context), values["tp"]


def _loads(setting: ReplaySetting, values: dict[str, Any]) -> list[Workload]:
    """Made-up requests run for a number of rounds; of a trace every answer is served, and all of them whole."""
    from wager.economics.simulation.server import Workload
    from wager.economics.simulation.workload import Recorded

    if values["rate"] and values["concurrency"]:
        raise UsageError("--rate and --concurrency are two kinds of load.", "Give one of them.")
    answers = len(setting.world) if isinstance(setting.world, Recorded) else 0
    seed, rounds = values["seed"], values["rounds"]
    if values["rate"]:
        rates = _numbers("rate", values["rate"])
        requests = answers or max(100, 3 * rounds // (values["output"] or _OUTPUT))
        return [Workload(rate=rate, requests=requests, seed=seed) for rate in rates]
    users = [int(each) for each in _numbers("concurrency", values["concurrency"] or _DEFAULT_CONCURRENCY)]
    return [
        Workload(concurrency=each, requests=max(answers, 4 * each) if answers else None, rounds=max(rounds, 60 * each),
             seed=seed)
        for each in users
    ]  # fmt: skip


def _numbers(name: str, text: str) -> list[float]:
    found = []
    for word in text.split(","):
        try:
            number = float(word)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf") or (name == "concurrency" and number != int(number)):
            kind = "whole numbers" if name == "concurrency" else "numbers"
            raise UsageError(
                f"{name} = {word.strip()!r} is out of range.", f"Write --{name} 1,4,16 with {kind} above 0."
            )
        found.append(number)
    return found


# ---- the table ------------------------------------------------------------------------------------------------------


def _show(points: Sequence[ReplayPoint], chosen: Sequence[str]) -> None:
    """A block a load: the best fixed depth, then the policies asked for."""
    columns = ["load", "policy", "tok/s", "per user", "per device", "τ", "drafted", "admitted", "vs fixed", "frontier"]
    rows = []
    for each in points:
        best = each.policy == each.best_fixed
        if best or each.policy in chosen:
            load = (
                f"{each.concurrency} user{'s' * (each.concurrency > 1)}"
                if each.concurrency
                else f"{each.rate:g} a second"
            )
            name = f"{each.policy} (best)" if best and each.policy != "none" else each.policy
            figures = [f"{each.throughput:.0f}", f"{each.per_user:.1f}", f"{each.per_device:.0f}", f"{each.tau:.2f}"]
            figures += [f"{each.drafted:.2f}", f"{each.admitted:.2f}", f"{-100 * each.regret:+.1f} %"]
            rows.append([load, name, *figures, "•" if each.frontier else ""])
    console.table("", columns, rows, to_stdout=True)
