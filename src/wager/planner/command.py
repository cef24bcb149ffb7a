"""`wager plan`: for a model, a device, batch and context, which draft depth pays off, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from wager.config import DEFAULT_MODEL
from wager.errors import UsageError
from wager.terminal import console, flags

deployment_flags = flags.add(
    [
        click.option("--tp", type=int, metavar="N", default=1, help="Devices that split every matrix."),
        click.option("--ep", type=int, metavar="N", default=1, help="Ranks that split the experts, in groups of --tp."),
        click.option(
            "--popularity",
            type=flags.InputPath(),
            help='How likely a token is to choose each expert: {"popularity": [...]}. Without it all are equal.',
        ),
        click.option(
            "--locality",
            type=float,
            metavar="X",
            help="T tokens of one request choose as many distinct experts as T^X unrelated ones. 1: no locality; 0.79 "
            "was measured on one model.  [default: that of the --popularity file, or 1]",
        ),
        click.option(
            "--precision",
            metavar="WEIGHTS[:EXPERTS[:HEAD]]",
            help="How weights, experts and LM head are stored, such as fp8, bf16:mxfp4, awq or q4_k_m. Quantised "
            "weights leave head and router in bf16, as checkpoints do; fp8::fp8 does not. Without it as published.",
        ),
        click.option("--cache", metavar="FORMAT", help="How keys and values are stored. Without it as published."),
        click.option(
            "--dispatch",
            metavar="OUT[:BACK]",
            help="How rows are sent to experts on other devices (--ep) and back; BACK is as OUT unless given.  "
            "[default: as DeepEP does, fp8:bf16 to experts computed in 8 or 4 bits, else bf16:bf16]",
        ),
        click.option("--overhead", default="0us", metavar="TIME", help="Fixed time of every step."),
        click.option(
            "--any-model",
            is_flag=True,
            help="Warn instead of refusing where a file of acceptance or popularity was measured with another model.",
        ),
    ]
)
"""What `wager plan` and `wager replay` share: how the model is divided, routed and stored."""


@click.command(
    "plan",
    cls=flags.Verb,
    main="model hardware batches contexts acceptances shape tp precision price engine json_path",
)
@click.option(
    "-m",
    "--model",
    default=DEFAULT_MODEL,
    metavar="MODEL",
    help="A published model, or one on this machine, by name; a config.json or its directory; or a GGUF file.",
)
@click.option(
    "--hardware",
    required=True,
    metavar="NAME",
    help="A GPU by name (H100, B200, RTX-4090, ...), cpu, this (as calibrated), or a JSON file. The file has peaks and "
    "bandwidth, or is what `wager calibrate` wrote on another machine.",
)
@click.option(
    "--batch",
    "batches",
    default="1,2,4,8,16,32,64,128,256",
    metavar="N,...",
    help="Requests decoded together (of each rank or group, with --ep). k is 1024.",
)
@click.option(
    "--total-batch",
    is_flag=True,
    help="--batch counts the requests of all ranks or groups together, which share them evenly; fractions of a request "
    "are legal.",
)
@click.option(
    "--context",
    "contexts",
    metavar="N,...",
    help="Positions each request has cached; 128k is 131072.  [default: 4096, or the model's maximum if it is smaller]",
)
@click.option(
    "--acceptance",
    "acceptances",
    default="0.75",
    metavar="P,...|FILE",
    help="Acceptance rate of draft tokens, or mtp or dflash: the published curves. FILE holds by depth "
    '{"acceptance": [...]}, given that the token before was accepted, or {"survival": [...]}.',
)
@click.option(
    "--drafter-shape",
    "shape",
    metavar="SHAPE",
    help="What drafting costs: free, mtp, eagle3, dflash, dspark, eagle, block, medusa or model:NAME. By the drafter's "
    "own roofline. free: lookup; mtp: one layer like the target's and its head, a pass per token; "
    "eagle3, dflash, dspark: the head that was released for the model (:NAME: for that model); eagle[:VOCAB]: one "
    "layer on three hidden states, with a head over VOCAB tokens or the target's; block[:N]: one pass over N "
    "positions; medusa[:HEADS]: heads on the last hidden state; model:NAME: a smaller model; with --hardware this the "
    "name of a calibrated drafter.  [default: mtp, or the first that was calibrated]",
)
@click.option(
    "--drafter-cost",
    "drafter_cost",
    metavar="COST",
    help="The cost of a draft token instead: 0.1 is a tenth of a plain step; 300us or 2ms is time.",
)
@click.option(
    "--drafter-tp",
    type=int,
    metavar="N",
    help="Devices that split the drafter.  [default: as many as split the target]",
)
@deployment_flags
@click.option(
    "--tree",
    metavar="WIDTH[:P]",
    help="Trees with up to WIDTH children of a node instead of chains; a depth is a number of nodes then. P: the rate "
    "at which a sibling is right where those before it are wrong.  [default: 0.15]",
)
@click.option("--depth", type=int, metavar="N", help="Plan this depth. Without it the one with the largest speed-up.")
@click.option("--max-depth", type=int, metavar="N", help="Deepest draft to try.  [default: 16]")
@click.option("--balanced", is_flag=True, help="Experts are balanced: a rank reads the mean, not the fullest rank's.")
@click.option(
    "--link-latency", metavar="TIME", help="Time of every all-reduce or dispatch beside its bytes.  [default: 8us]"
)
@click.option(
    "--output",
    type=flags.Count(1, 1 << 20),
    default=512,
    metavar="N",
    help="Tokens of an answer, for the share of prompts (of --context positions) in the devices' time, and llama.cpp's "
    "cache.",
)
@click.option(
    "--price",
    type=click.FloatRange(0, 1e6, min_open=True),
    metavar="DOLLARS",
    help="Price of one device an hour, for dollars per million tokens.",
)
@click.option(
    "--export",
    "engine",
    type=click.Choice(["vllm", "sglang", "llama.cpp"]),
    help="Write the command that serves this plan, instead of the table. It is a shell script with what the engine "
    "cannot express and what that costs in its comments; with --json fields (docs/export.md).",
)
@flags.json_flag
def command(
    *,
    model: str,
    hardware: str,
    batches: str,
    contexts: str | None,
    acceptances: str,
    total_batch: bool,
    output: int,
    price: float | None,
    engine: str | None,
    json_path: Path | None,
    **settings: Any,
) -> None:
    """Estimate the speed-up of speculative decoding before you run it.

    From a model's published shape and a device's datasheet: the time of a step, which draft depth pays off at each
    batch and context, what bounds the step, and where no depth is faster than plain decoding. Nothing is loaded and
    nothing is measured; docs/economics.md has the formulas. With --hardware this the step times are those that `wager
    calibrate` measured.
    """
    from wager.planner.acceptance import parse_acceptances
    from wager.planner.export import export_plan
    from wager.planner.inputs import check_origin, parse_integers
    from wager.planner.options import PlanSettings, check_drafter, plan_deployment
    from wager.planner.report import PlanReport

    if engine and not json_path:
        flags.refuse(["price", *["output"] * (engine != "llama.cpp")], "with --export and without --json")
    deployment = replace(plan_deployment(model, hardware, PlanSettings(**settings)), output=output)
    groups = deployment.cost.cluster.groups
    if total_batch and groups == 1:
        raise UsageError("--total-batch has no effect without several groups (--ep).", "Leave it out.")
    if total_batch:
        deployment = replace(deployment, share=1 / groups)
    rates = parse_acceptances(acceptances)
    for noted in (each.noted for each in rates if each.noted):
        check_origin(noted, model, deployment.cost.model, allowed=settings["any_model"])
        check_drafter(noted, deployment, settings["shape"])
    if contexts is None:
        contexts = str(min(4096, deployment.cost.model.context, deployment.drafter.max_context or 4096))
    report = PlanReport.build(
        deployment,
        batches=parse_integers("batch", batches),
        contexts=parse_integers("context", contexts),
        acceptances=rates,
        price=price,
    )
    typed = {name: settings[name] for name in ("shape", "precision", "cache")}
    exported = export_plan(report, engine, model=model, **typed) if engine else None
    if json_path:
        console.write_json(report.as_dict() | ({"export": asdict(exported)} if exported else {}), json_path)
    if exported and json_path != console.STDOUT:
        click.echo(exported.text())
    elif json_path != console.STDOUT:
        show(report.summary(), *report.table(), report.notes())


def show(head: Iterable[str], columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str]) -> None:
    """A report of `wager plan` or `wager replay`: lines, a table, and what is wrapped below it."""
    for line in head:
        click.echo(console.legible(line))
    console.table("", columns, rows, to_stdout=True)
    for line in notes:
        click.echo(console.wrapped(line))
