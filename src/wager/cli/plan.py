"""`wager plan`: the bill before you pay. For a model, a machine, batch and context: which depth pays, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from wager.cli import console, flags, plan_inputs
from wager.config import DEFAULT_MODEL

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.command("plan")
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar="MODEL",
    help="A published model by name, a directory with config.json, or a GGUF file.",
)
@click.option(
    "--hardware",
    required=True,
    metavar="NAME",
    help="A GPU by name (H100, B200, RTX-4090, ...), cpu, a JSON file with peaks and bandwidth, or this: what "
    "`wager calibrate` measured here (or a file that it wrote elsewhere).",
)
@click.option(
    "--batch",
    "batches",
    default="1,2,4,8,16,32,64,128,256",
    show_default=True,
    metavar="N,...",
    help="Requests decoded together (of each rank, with --ep).",
)
@click.option(
    "--context",
    "contexts",
    metavar="N,...",
    help="Positions each request has cached.  [default: 4096, or all that the model takes if fewer]",
)
@click.option(
    "--acceptance",
    "acceptances",
    default="0.75",
    show_default=True,
    metavar="P,...|FILE",
    help='How often a guess is right. FILE holds by depth {"acceptance": [...]}, given that the guess before '
    'was right, or {"survival": [...]}.',
)
@click.option(
    "--drafter-shape",
    "shape",
    metavar="SHAPE",
    help="What guessing costs, by the drafter's own roofline. free: lookup; mtp: one layer like the target's "
    "and its head, a pass a guess; block[:N]: one pass over N positions; model:NAME: a smaller model; with --hardware "
    "this the name of a calibrated drafter.  [default: mtp, or the first that was calibrated]",
)
@click.option(
    "--drafter-cost",
    "price",
    metavar="COST",
    help="What a guess costs instead: 0.1 is a tenth of a plain step; 300us or 2ms is time.",
)
@click.option("--depth", type=int, metavar="N", help="Bill this many guesses. Without it the depth that pays best.")
@click.option("--max-depth", "most", type=int, default=16, show_default=True, metavar="N", help="Deepest draft to try.")
@click.option("--tp", type=int, default=1, show_default=True, metavar="N", help="Devices that split every matrix.")
@click.option("--ep", type=int, default=1, show_default=True, metavar="N", help="Ranks that split the experts.")
@click.option(
    "--popularity",
    type=_PATH,
    metavar="FILE",
    help='How often a token wants each expert: {"popularity": [...]}. Without it all alike.',
)
@click.option(
    "--locality",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="T tokens of one request hit as many experts as T^X unrelated ones. Measured once: 0.79; 1 is none.",
)
@click.option(
    "--precision",
    metavar="FORMAT[:EXPERTS]",
    help="How weights (and experts) are stored, such as fp8 or bf16:mxfp4. Without it as published.",
)
@click.option("--cache", metavar="FORMAT", help="How keys and values are stored. Without it as published.")
@click.option("--overhead", default="0us", show_default=True, metavar="TIME", help="Fixed time of every step.")
@click.option("--html", "html_path", type=_PATH, metavar="PATH", help="Write a page with the table and the drawings.")
@click.option("--plot", "plot_path", type=_PATH, metavar="PATH", help="Write the drawings alone: .png, .svg or .pdf.")
@flags.json_flag
def command(
    *, model: str, hardware: str, batches: str, contexts: str | None, acceptances: str, json_path: Path | None,
    html_path: Path | None, plot_path: Path | None, **settings: Any,
) -> None:  # fmt: skip
    """Price speculation before you pay for it.

    From a model's published shape and a machine's datasheet: what a step costs, how many guesses pay at each batch and
    context, what the step waits for, and where plain decoding wins at every depth (the gutter). Nothing is loaded and
    nothing is measured; docs/economics.md has the formulas. With --hardware this the steps are those that `wager
    calibrate` measured.
    """
    from wager.cli import plan_text

    for path in (json_path, html_path, plot_path):
        console.check_writable(path)
    if html_path or plot_path:
        from wager.cli import plan_page
    question = plan_inputs.question(model, hardware, **settings)
    rates = plan_inputs.acceptances(acceptances)
    contexts = contexts or str(min(4096, question.cost.model.context))
    grid = plan_inputs.Grid(plan_inputs.whole("batch", batches), plan_inputs.whole("context", contexts), tuple(rates))
    answer = plan_text.Answer.of(question, grid)
    if json_path:
        console.write_json(answer.as_dict(), json_path)
    if plot_path:
        plan_page.write_plot(answer, plot_path)
    if html_path:
        plan_page.write_page(answer, html_path)
    if str(json_path) != "-":
        _show(answer)
    for path in (plot_path, html_path):
        if path:
            console.say(f"drawn in {path}")


def _show(answer: Any) -> None:
    for line in answer.opening():
        click.echo(line)
    columns, rows = answer.table()
    console.table("", columns, rows, to_stdout=True)
    _paragraphs(answer.notes())


def _paragraphs(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(click.wrap_text(line, width=100, subsequent_indent="  "))
