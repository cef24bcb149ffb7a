"""`wager train`: a drafter for a model, trained on the model's own answers and hidden states."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.config import EngineConfig, parse_size
from wager.errors import UsageError
from wager.inputs import expand_path, shown, whole_number
from wager.prompts import read_prompts
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.arch.spec import ModelSpec
    from wager.train.data import TrainingTarget, TrainingText
    from wager.train.session import StepReport

KINDS = ("eagle3", "dspark", "medusa", "pruned", "store")
_DRAFTERS = {"eagle3": "eagle3", "dspark": "dflash", "medusa": "medusa", "pruned": "model"}
"""The drafter that runs what is trained, by its kind."""
_OF_TRAINING = (
    *("passes", "steps", "batch", "longest", "layers", "inner", "state_norms", "loss", "rate", "vocabulary"),
    *("taps", "begin_with", "rounded", "device", "precision", "save_every"),
)
_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "eagle3": ("size", "layers"),
    "dspark": ("size", "state_norms"),
    "medusa": ("size", "state_norms", "layers", "inner", "taps"),
    "pruned": ("size", "state_norms", "inner", "taps"),
    "store": _OF_TRAINING,
}
"""Options that say nothing of a kind."""
_REPORTS = 10
"""Steps between two lines of progress."""


_MOST, _MOST_LAYERS = 10**9, 256


def _layers(value: str) -> tuple[int, ...]:
    numbers = [whole_number(part.strip()) for part in value.split(",")]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise UsageError(f"{value!r} is no list of layers, such as 2,15,27.")
    return tuple(sorted(number for number in numbers if number is not None))


def _count_or_layers(value: str) -> int | tuple[int, ...]:
    number = whole_number(value)
    if number is None:
        return _layers(value)
    if not 1 <= number <= _MOST_LAYERS:
        raise UsageError(f"{value} is not in the range 1<=x<={_MOST_LAYERS}.")
    return number


@click.command(
    "train",
    cls=flags.Verb,
    main="kind output prompts made_up answers apart_from passes steps depth device planned model json_path",
)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="eagle3",
    help="A head on the model's states, a draft model of some of its layers (pruned), or a store of its answers, which "
    "needs no training.",
)
@click.option(
    "-o",
    "--output",
    metavar="FOLDER",
    help="Folder of answers, checkpoint and the trained drafter; not needed with --plan.",
)
@click.option("--prompts", type=flags.InputPath(), help="Prompts to answer, a file as for `wager bench`.")
@click.option(
    "--made-up",
    type=flags.Count(0, 1_000_000),
    default=0,
    help="Prompts that the model makes up itself, after the bare header of its chat template.",
)
@click.option(
    "--answers",
    type=flags.InputPath(),
    multiple=True,
    help='Answers that the model gave before: JSON lines {"prompt_ids", "token_ids"}, or a log of requests with their '
    "answers, as for `wager acceptance --recorded`. Repeatable.",
)
@click.option(
    "--apart-from",
    type=flags.InputPath(),
    multiple=True,
    help="Prompts that are measured on: refuse to train if one of them is among the prompts. Repeatable.",
)
@click.option(
    "--answer-tokens",
    type=flags.Count(0, 100_000),
    default=160,
    help="Longest answer; 0 trains on the prompts' own text alone.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    multiple=True,
    default=(0.0,),
    show_default=False,
    metavar="X",
    help="Temperature of the answers, 0 without it; repeated, every prompt is answered once at each.",
)
@click.option(
    "--concurrency",
    type=flags.Count(1, flags.MOST_CONCURRENT),
    default=32,
    help="Prompts that the engine answers together; on a GPU as many as fit are.",
)
@click.option(
    "--passes", type=click.FloatRange(0, 10_000, min_open=True), default=2.0, metavar="X", help="Passes over the texts."
)
@click.option("--steps", type=flags.Count(1, _MOST), help="Steps, in place of --passes.")
@click.option("--batch", type=flags.Count(16, 1 << 24), default=2048, help="Tokens of a step.")
@click.option("--longest", type=flags.Count(8, 1 << 20), default=512, help="Tokens after which a text is cut off.")
@click.option("--depth", type=flags.Count(1, 16), default=3, help="Guesses that are trained for.")
@click.option(
    "--layers",
    type=flags.Parsed(_count_or_layers),
    metavar="N",
    help="Layers of a block drafter (dspark: 2), or of the model that a pruned draft keeps (6): a number, "
    "half of them the first and half the last, or which, such as 0,1,2,28,29.",
)
@click.option(
    "--inner",
    type=flags.Count(16, 1 << 20),
    metavar="N",
    help="Width of a head's feed-forward. Without it the model's.",
)
@click.option(
    "--state-norms/--no-state-norms",
    default=True,
    help="EAGLE-3: norm every tap, and feed back what the last norm gave (3.1). llama.cpp loads only heads without.",
)
@click.option(
    "--loss",
    type=click.Choice(["kl", "tv", "ce", "lk"]),
    default="kl",
    help="KL divergence from the model's whole distribution, total variation, cross-entropy on its first "
    "choice, or KL that turns into total variation as they come to overlap.",
)
@click.option("--rate", type=click.FloatRange(0, 1, min_open=True), default=1e-3, metavar="X", help="Learning rate.")
@click.option(
    "--vocabulary",
    type=flags.Count(2, 1 << 24),
    default=8192,
    help="Tokens that can be guessed: the N most frequent of the texts.",
)
@click.option(
    "--taps",
    type=flags.Parsed(_layers),
    metavar="N,N,...",
    help="Layers whose states are read; N is after N layers. Without it 2, the middle, the last but 3.",
)
@click.option("--seed", type=flags.Count(0, 1 << 31), default=0)
@click.option(
    "--begin-with",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Begin with the weights and the draft vocabulary of an earlier run or an EAGLE-3 head, on other texts say.",
)
@click.option(
    "--rounded",
    is_flag=True,
    help="Round matrices to 4 bits in every step, so that a head loses nothing when it is stored in them.",
)
@click.option(
    "--size",
    type=flags.Parsed(parse_size),
    metavar="SIZE",
    help="Largest store, such as 8MiB: the most useful continuations are kept. Without it all are.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option(
    "--precision",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    help="Number format of products; auto is bfloat16 where the device multiplies it.",
)
@click.option("--save-every", type=flags.Count(1, _MOST), default=50, help="Steps between two checkpoints.")
@click.option(
    "--plan",
    "planned",
    is_flag=True,
    help="Say what it would take and bring, time, disk and survival, by runs that were measured; nothing is trained.",
)
@click.option("--hardware", metavar="NAME", help="The machine of --plan, as for `wager plan`.  [default: cpu]")
@flags.engine_flags(only=("model", "threads", "memory"))
@flags.json_flag
def command(
    *,
    kind: str,
    output: str | None,
    planned: bool,
    hardware: str | None,
    config: EngineConfig,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Train a drafter for a model and write it to FOLDER, ready for `--drafter`.

    The model answers the prompts; its hidden states and its whole distribution after each token are computed again on
    these texts, and the drafter learns to guess from them. One text in forty is held out, and the acceptance on those
    is estimated at the end.

    A command that was stopped, even killed, goes on where it was if it is given again: answers are kept in FOLDER, and
    so is a checkpoint every --save-every steps. The result is that of an uninterrupted run.
    """
    if not (options["prompts"] or options["made_up"] or options["answers"]):
        raise UsageError("There is nothing to train on.", "Give --prompts FILE, --made-up N or --answers FILE.")
    flags.refuse(_WITHOUT_EFFECT[kind], f"with --kind {kind}")
    options["prompts"] = read_prompts(options["prompts"]) if options["prompts"] else []  # once: it may be a pipe
    if options["steps"]:
        flags.refuse(["passes"], "with --steps")
    if options["begin_with"]:
        flags.refuse(["vocabulary"], "with --begin-with, whose draft vocabulary is taken")
    if not (options["prompts"] or options["made_up"]):
        flags.refuse(["answer_tokens", "temperature", "concurrency"], "without --prompts or --made-up")
    if planned:
        _plan(kind, hardware or "cpu", config.model.model, options, json_path)
        return
    if hardware is not None:
        raise UsageError(f"--hardware {shown(hardware)} has no effect without --plan.", "Training runs on --device.")
    if output is None:
        raise UsageError("There is no folder to write to.", "Give --output FOLDER, or --plan.")
    from wager.models import hub

    if not hub.is_random(config.model.model):  # what is missing is said before torch is imported
        hub.find(config.model.model)
    folder = expand_path(output)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        cause = error.strerror or str(error)
        raise UsageError(f"--output {shown(output)} cannot be made: {cause}.", "Give a folder.") from error
    run = _store if kind == "store" else _trained
    figures, written = run(kind, folder, config, options)
    console.write_json(figures, json_path)
    held_out = figures["held_out"]
    if held_out["rounds"]:
        rows = [[str(depth), f"{share:.3f}"] for depth, share in enumerate(held_out["survival"], 1)]
        caption = f"τ {held_out['tau']:.2f} over {held_out['rounds']} rounds of {held_out['texts']} held-out texts"
        to_stdout = json_path != console.STDOUT
        console.table("survival by depth", ["depth", "survival"], rows, to_stdout=to_stdout, caption=caption)
    else:
        why = "Held-out texts are too short" if held_out["texts"] else "Of so few texts none is held out"
        console.say(f"{why} to say how often guesses are right: ask `wager acceptance`.")
    console.say(written)


def _plan(kind: str, hardware: str, model: str, options: Mapping[str, Any], json_path: Path | None) -> None:
    """Print what the command would take and bring."""
    from wager.planner import training
    from wager.planner.inputs import find_hardware, find_plan_model
    from wager.train.answers import count_tokens

    target, device = find_plan_model(model), find_hardware(hardware)
    head = training.HeadShape(kind, options["depth"], options["vocabulary"], options["inner"])
    known = sum(map(count_tokens, options["answers"]))
    needs = training.needs(
        answers=(len(options["prompts"]) + options["made_up"]) * len(options["temperature"]),
        longest=options["answer_tokens"],
        known_tokens=known,
        passes=options["passes"],
        trained=options["steps"] and options["steps"] * options["batch"],
    )
    plan = training.plan_training(target, device, head, needs)
    console.write_json({"model": target.name, "hardware": device.name, **needs.as_dict(), **plan.as_dict()}, json_path)
    rows = [[what, value] for what, value in training.lines(plan, needs)]
    caption = training.caveat(kind, target, plan)
    console.table(
        f"{kind} for {target.name} on {device.name}",
        ["", ""],
        rows,
        to_stdout=json_path != console.STDOUT,
        caption=caption,
    )


def _trained(kind: str, folder: Path, config: EngineConfig, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The figures of a run, and a line that says where its drafter is."""
    from wager.train import require_torch

    require_torch()
    from wager.train.session import RunOptions, TrainingSession, TrainSettings, head_sizes
    from wager.train.target import choose_device

    device, precision = choose_device(options["device"], options["precision"], threads=config.model.threads)
    settings = TrainSettings(
        kind=kind,
        steps=options["steps"] or 1,
        precision=precision,
        **{name: options[name] for name in ("batch", "depth", "loss", "rate", "seed", "rounded")},
    )
    run_options = RunOptions(
        passes=None if options["steps"] else options["passes"],
        device=device,
        command=_command(),
        **{
            name: options[name]
            for name in ("taps", "layers", "inner", "state_norms", "longest", "vocabulary", "save_every", "begin_with")
        },
    )
    sizes = partial(head_sizes, options=run_options, settings=settings, mask_token=0)
    target, texts = _collected(config, folder, options, check=sizes, device=device, precision=precision)
    if not any(text.answered for text in texts):
        run_options = replace(run_options, prompt_weight=1.0)
    session = TrainingSession(target, texts, settings, run_options, folder)
    data = session.data
    console.say(f"{len(data.train)} texts of {data.tokens} tokens, {len(data.held_out)} texts held out")
    if session.step:
        console.say(f"going on after step {session.step}")
    figures = {**session.run(_progress(session.settings.steps)), "history": session.history}
    return figures, f"written to {folder}: --drafter {_DRAFTERS[kind]}:{folder}"


def _store(_kind: str, folder: Path, config: EngineConfig, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    from wager.train.store_run import STORE, run_store

    target, texts = _collected(config, folder, options)
    private = any(path.stat().st_mode & 0o077 == 0 for path in options["answers"])  # as corpus export writes them
    header, acceptance = run_store(
        target,
        texts,
        folder,
        depth=options["depth"],
        max_bytes=options["size"],
        command=_command(),
        mode=0o600 if private else None,
    )
    figures = {"entries": header.entries, "tokens": header.tokens, "held_out": acceptance.as_dict()}
    size = f"{header.entries} continuations of {header.tokens} tokens"
    return figures, f"{size}: --drafter store:{folder / STORE}"


def _command() -> str:
    return shlex.join(["wager", *sys.argv[1:]])


def _collected(
    config: EngineConfig,
    folder: Path,
    options: Mapping[str, Any],
    *,
    check: Callable[[ModelSpec], object] | None = None,
    device: str = "cpu",
    precision: str = "float32",
) -> tuple[TrainingTarget, list[TrainingText]]:
    """The target, which is checked first, and everything to train on. If something has to be written, the engine is
    loaded for it, or on a GPU the target in torch, once, and freed."""
    from wager.cli.loading import open_engine
    from wager.cli.measuring import count_answers
    from wager.models.opening import open_model
    from wager.train.answers import Author, TextSources, author_of, collect_texts
    from wager.train.data import TrainingTarget

    path, weights, tokenizer = open_model(config.model.model)
    if check is not None:
        check(weights.spec)
    target = TrainingTarget(config.model.model, path, weights, tokenizer)
    sources = TextSources(**{name: options[name] for name in TextSources.__slots__})

    @cache
    def author() -> Author:
        engine, concurrency = partial(open_engine, config), options["concurrency"]
        return author_of(target, device=device, precision=precision, engine=engine, concurrency=concurrency)

    with console.meter("answers") as update:
        texts = collect_texts(
            target,
            sources,
            folder,
            author=author,
            on_output=lambda total: count_answers(update, "Answering", total),
        )
    return target, texts


def _progress(steps: int) -> Callable[[StepReport], None]:
    """Lines with the means of the last steps: loss, and by depth the share of first choices that are the model's."""
    waiting: list[StepReport] = []

    def report(step: StepReport) -> None:
        waiting.append(step)
        if len(waiting) < _REPORTS and step.step + 1 < steps:
            return
        loss = sum(item.loss for item in waiting) / len(waiting)
        depths = zip(*(item.agreement for item in waiting), strict=True)
        agreement = " ".join(f"{sum(depth) / len(waiting):.3f}" for depth in depths)
        console.say(f"step {step.step + 1} of {steps}: loss {loss:.3f}, agreement by depth {agreement}")
        waiting.clear()

    return report
