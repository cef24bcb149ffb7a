"""`wager popularity`: which experts a model chooses for your prompts, for `wager plan --popularity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.config import EngineConfig
from wager.prompts import Prompt
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.planner.routing import MeasuredRouting

_MOST_TOKENS = 4096


@click.command("popularity", cls=flags.Verb, main="limit model max_tokens json_path")
@flags.prompts_flags()
@flags.framing_flags
@flags.engine_flags(only=("model", "threads", "memory", "max_context"))
@click.option(
    "--max-tokens",
    type=flags.Count(0, _MOST_TOKENS),
    default=64,
    help="Greedy tokens of each answer that are recorded too; 0 records the prompts alone.",
)
@flags.json_flag
def command(
    *, prompts: list[Prompt], framing: flags.Framing, config: EngineConfig, max_tokens: int, json_path: Path | None
) -> None:
    """Count which experts a mixture of experts chooses for the prompts of FILE and the beginning of its answers.

    Popularity is how often a token chooses each expert; locality, how many fewer distinct experts consecutive tokens of
    one text choose than tokens of different texts. Both lower the cost of a step: with --json FILE they are stored, and
    `wager plan --popularity FILE` uses them. FILE of prompts is as for `wager bench`.
    """
    from wager.cli.loading import open_engine
    from wager.planner.routing import measure_routing
    from wager.profiling.texts import record_choices

    engine = open_engine(config, keep_expert_choices=True)
    tokens = [framing.encode(engine.tokenizer, prompt.content) for prompt in prompts]
    with console.meter("prompts") as update:
        texts = record_choices(
            engine.target.decoder,
            tokens,
            max_tokens=max_tokens,
            eos=engine.tokenizer.eos_ids,
            max_context=engine.target.opened.limits.context,
            report=lambda done: update("Recording", done, len(tokens)),
        )
    experts = engine.spec.experts
    routing = measure_routing(texts, experts.count if experts else 0)
    counts = {"experts": len(routing.popularity), "active": texts[0].shape[2]}
    about = {"model": config.model.model, **engine.target.opened.fingerprints, **counts}
    console.write_json({**about, **routing.as_dict()}, json_path)
    if json_path != console.STDOUT:
        _show(routing, model=config.model.model)
        if json_path:
            console.say(f"written to {json_path}; wager plan --model {config.model.model} --popularity {json_path}")


def _show(routing: MeasuredRouting, *, model: str) -> None:
    from wager.planner.routing import distinct_experts

    experts, active = len(routing.popularity), round(sum(routing.popularity))
    columns = ["tokens", "of one text", "of different texts", "by popularity", "by locality", "uniform routing"]
    rows: list[list[str]] = []
    for count in routing.counts:
        local = routing.expected_in_run(count.tokens)
        uniform = distinct_experts(experts, active, count.tokens)
        cells: list[Any] = [count.run, count.unrelated, count.by_popularity, local, uniform]
        rows.append([str(count.tokens), *("–" if cell is None else f"{cell:.2f}" for cell in cells)])
    console.table(f"{model}: distinct experts of {experts} in a layer, {active} a token", columns, rows, to_stdout=True)
    top, fair = routing.popularity[0], active / experts
    lines = [
        f"Counted over {routing.positions} tokens of {routing.texts} texts; means over {len(routing.layers)} layers.",
        f"Popularity: a token chooses a layer's most popular expert with probability {top:.3f}, {top / fair:.1f} times "
        f"its even share of {fair:.3f}.",
        "Locality cannot be measured: two consecutive tokens already choose nearly all experts."
        if routing.locality is None
        else f"Locality: T consecutive tokens of one text choose as many experts as T^{routing.locality:.2f} tokens of "
        "different texts (column by locality).",
    ]
    if routing.is_short:
        lines.append(
            f"{routing.positions} tokens are few: counts of rarely chosen experts are uncertain and the skew is "
            "overstated. Give more prompts."
        )
    for line in lines:
        click.echo(console.wrapped(line))
