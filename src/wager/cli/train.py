"""`wager train`: a drafter for a model, trained on the model's own answers and hidden states."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.config import EngineConfig, parse_size
from wager.errors import UsageError
from wager.inputs import expand_path, shown, whole_number
from wager.terminal import console, flags

if TYPE_CHECKING:
    from wager.arch.spec import ModelSpec
    from wager.loading.load import LoadedEngine
    from wager.models.tokenizer import Tokenizer
    from wager.train.data import TrainingTarget, TrainingText
    from wager.train.session import TrainingSession
    from wager.train.trainer import StepReport

KINDS = ("eagle3", "dspark", "medusa", "pruned", "store")
_DRAFTERS = {"eagle3": "eagle3", "dspark": "dflash", "medusa": "medusa", "pruned": "model"}
"""The drafter that runs what is trained, by its kind."""
_REPORTS = 10
"""Steps between two lines of progress."""


def _folder(output: str) -> Path:
    """The folder of --output, made if it is not there."""
    path = expand_path(output)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        cause = error.strerror or str(error)
        raise UsageError(f"--output {shown(output)} cannot be made: {cause}.", "Give a folder.") from error
    return path


def _count_or_layers(ctx: click.Context, param: click.Parameter, value: str | None) -> int | tuple[int, ...] | None:
    number = whole_number(value) if value is not None else None
    if number is None:
        return _layers(ctx, param, value)
    if not 1 <= number <= _MOST_LAYERS:
        raise click.BadParameter(f"{value} is not in the range 1<=x<={_MOST_LAYERS}.")
    return number


def _layers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = [whole_number(part.strip()) for part in value.split(",")]
    if any(number is None for number in numbers) or len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"{value!r} is no list of layers, such as 2,15,27.")
    return tuple(sorted(number for number in numbers if number is not None))


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else flags.as_bad_parameter(lambda: parse_size(value))


_INPUT = click.Path(dir_okay=False, path_type=Path)
_MOST, _MOST_LAYERS = 10**9, 256
_SOURCES = [
    click.option(
        "--prompts", type=_INPUT, metavar="FILE", help='Prompts to answer: JSON lines with "prompt" or "turns".'
    ),
    click.option(
        "--made-up",
        type=click.IntRange(0, 1_000_000),
        default=0,
        show_default=True,
        metavar="N",
        help="Prompts that the model makes up itself, after the bare header of its chat template.",
    ),
    click.option(
        "--answers",
        type=_INPUT,
        multiple=True,
        metavar="FILE",
        help='Answers that the model gave before: JSON lines {"prompt_ids", "token_ids"}. Repeatable.',
    ),
    click.option(
        "--apart-from",
        type=_INPUT,
        multiple=True,
        metavar="FILE",
        help="Prompts that are measured on: refuse to train if one of them is among the prompts. Repeatable.",
    ),
    click.option(
        "--answer-tokens",
        type=click.IntRange(0, 100_000),
        default=160,
        show_default=True,
        metavar="N",
        help="Longest answer; 0 trains on the prompts' own text alone.",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1, flags.MOST_CONCURRENT),
        default=32,
        show_default=True,
        metavar="N",
        help="Prompts that are answered together.",
    ),
]
_NUMBERS = [
    click.option(
        "--passes",
        type=click.FloatRange(0, 10_000, min_open=True),
        default=2.0,
        show_default=True,
        metavar="X",
        help="Passes over the texts.",
    ),
    click.option("--steps", type=click.IntRange(1, _MOST), metavar="N", help="Steps, in place of --passes."),
    click.option(
        "--batch",
        type=click.IntRange(16, 1 << 24),
        default=2048,
        show_default=True,
        metavar="N",
        help="Tokens of a step.",
    ),
    click.option(
        "--longest",
        type=click.IntRange(8, 1 << 20),
        default=512,
        show_default=True,
        metavar="N",
        help="Tokens after which a text is cut off.",
    ),
    click.option(
        "--depth",
        type=click.IntRange(1, 16),
        default=3,
        show_default=True,
        metavar="N",
        help="Guesses that are trained for.",
    ),
    click.option(
        "--layers",
        callback=_count_or_layers,
        metavar="N",
        help="Layers of a block drafter (dspark: 2), or of the model that a pruned draft keeps (6): a number, "
        "half of them the first and half the last, or which, such as 0,1,2,28,29.",
    ),
    click.option(
        "--loss",
        type=click.Choice(["kl", "tv", "ce", "lk"]),
        default="kl",
        show_default=True,
        help="KL divergence from the model's whole distribution, total variation, cross-entropy on its first "
        "choice, or KL that turns into total variation as they come to overlap.",
    ),
    click.option(
        "--rate",
        type=click.FloatRange(0, 1, min_open=True),
        default=1e-3,
        show_default=True,
        metavar="X",
        help="Learning rate.",
    ),
    click.option(
        "--vocabulary",
        type=click.IntRange(2, 1 << 24),
        default=8192,
        show_default=True,
        metavar="N",
        help="Tokens that can be guessed: the N most frequent of the texts.",
    ),
    click.option(
        "--taps",
        callback=_layers,
        metavar="N,N,...",
        help="Layers whose states are read; N is after N layers. Without it 2, the middle, the last but 3.",
    ),
    click.option("--seed", type=click.IntRange(0, 1 << 31), default=0, show_default=True, metavar="N"),
]
_RUN = [
    click.option(
        "--begin-with",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Begin with the weights of an earlier run, on other texts say; its draft vocabulary is taken.",
    ),
    click.option(
        "--size",
        callback=_size,
        metavar="SIZE",
        help="Largest store, such as 8MiB: the most useful continuations are kept. Without it all are.",
    ),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option(
        "--precision",
        type=click.Choice(["auto", "bfloat16", "float32"]),
        default="auto",
        show_default=True,
        help="Of products; auto is bfloat16 where the device multiplies it.",
    ),
    click.option(
        "--save-every",
        type=click.IntRange(1, _MOST),
        default=50,
        show_default=True,
        metavar="N",
        help="Steps between two checkpoints.",
    ),
    click.option(
        "--keep-states",
        is_flag=True,
        help="Keep the model's states on disk, kilobytes a token: later passes take half the time.",
    ),
]


@click.command("train", cls=flags.Verb)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="eagle3",
    show_default=True,
    help="A head on the model's states, a draft model of some of its layers (pruned), or a store of its answers, which "
    "needs no training.",
)
@click.option(
    "-o", "--output", required=True, metavar="FOLDER", help="Folder of answers, checkpoint and the trained drafter."
)
@flags.add(_SOURCES)
@flags.add(_NUMBERS)
@flags.add(_RUN)
@flags.engine_flags(only=("model", "threads", "memory"))
@flags.json_flag
def command(*, kind: str, output: str, config: EngineConfig, json_path: Path | None, **options: Any) -> None:
    """Train a drafter for a model and write it to FOLDER, ready for `--drafter`.

    The model answers the prompts; its hidden states and its whole distribution after each token are computed again on
    these texts, and the drafter learns to guess from them. One text in forty is held out, and the acceptance on those
    is estimated at the end.

    A command that was stopped, even killed, goes on where it was if it is given again: answers are kept in FOLDER, and
    so is a checkpoint every --save-every steps. The result is that of an uninterrupted run.
    """
    if not (options["prompts"] or options["made_up"] or options["answers"]):
        raise UsageError("There is nothing to train on.", "Give --prompts FILE, --made-up N or --answers FILE.")
    folder = _folder(output)
    if kind == "store":
        _store(folder, config, options, json_path)
        return
    session = _session(kind, folder, config, options)
    if session.trainer.step:
        console.say(f"going on after step {session.trainer.step}")
    result = session.run(_progress(session.settings.steps))
    if json_path:
        console.write_json({**result.figures, "history": list(result.history)}, json_path)
    _show_survival(result.figures["held_out"], to_stdout=str(json_path) != "-")
    console.say(f"written to {folder}: --drafter {_DRAFTERS[kind]}:{folder}")


def _session(kind: str, folder: Path, config: EngineConfig, options: Mapping[str, Any]) -> TrainingSession:
    from wager.train import require_torch

    require_torch()
    from wager.train.session import RunOptions, TrainingSession
    from wager.train.target import check_trainable, choose_device, choose_precision, use_threads
    from wager.train.trainer import TrainSettings

    use_threads(config.model.threads)
    device = choose_device(options["device"])
    precision = choose_precision(options["precision"], device)
    target, _, texts = _collected(config, folder, options, check=check_trainable)
    settings = TrainSettings(
        kind=kind,
        steps=options["steps"] or 1,
        batch=options["batch"],
        depth=options["depth"],
        loss=options["loss"],
        rate=options["rate"],
        seed=options["seed"],
        precision=precision,
    )
    run_options = RunOptions(
        passes=None if options["steps"] else options["passes"],
        prompt_weight=0.3 if any(text.answered for text in texts) else 1.0,
        keep=options["keep_states"],
        begin_with=options["begin_with"],
        device=device,
        command=_command(),
        **{name: options[name] for name in ("taps", "layers", "longest", "vocabulary", "save_every")},
    )
    session = TrainingSession(target, texts, settings, run_options, folder)
    data = session.data
    console.say(f"{len(data.train)} texts of {data.tokens} tokens, {len(data.held_out)} texts held out")
    return session


def _command() -> str:
    return shlex.join(["wager", *sys.argv[1:]])


def _store(folder: Path, config: EngineConfig, options: Mapping[str, Any], json_path: Path | None) -> None:
    """`--kind store`."""
    from wager.train.store_run import STORE, run_store

    target, tokenizer, texts = _collected(config, folder, options)
    found = run_store(
        target, tokenizer, texts, folder, depth=options["depth"], max_bytes=options["size"], command=_command()
    )
    if json_path:
        console.write_json(found.figures, json_path)
    held_out = found.figures["held_out"]
    _show_survival(held_out, to_stdout=str(json_path) != "-")
    console.say(
        f"{found.header.entries} continuations of {found.header.tokens} tokens: --drafter store:{folder / STORE}"
    )


def _collected(
    config: EngineConfig, folder: Path, options: Mapping[str, Any], *, check: Callable[[ModelSpec], None] | None = None
) -> tuple[TrainingTarget, Tokenizer, list[TrainingText]]:
    """The target, which is checked first, and everything to train on; the engine is loaded if something has to be
    written, once, and freed."""
    from wager.cli.bench import count_answers
    from wager.cli.loading import open_engine
    from wager.models.opening import open_model
    from wager.train.answers import TextSources, collect_texts
    from wager.train.data import TrainingTarget

    path, weights, tokenizer = open_model(config.model.model)
    if check is not None:
        check(weights.spec)
    target = TrainingTarget.of(config.model.model, path, weights, tokenizer)
    sources = TextSources(**{name: options[name] for name in TextSources.__slots__})
    loaded: list[LoadedEngine] = []

    def engine() -> LoadedEngine:
        if not loaded:
            loaded.append(open_engine(config))
        return loaded[0]

    with console.meter("answers") as update:
        texts = collect_texts(
            target,
            tokenizer,
            sources,
            folder,
            engine=engine,
            on_output=lambda total: count_answers(update, "Answering", total),
        )
    return target, tokenizer, texts


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


def _show_survival(held_out: Mapping[str, Any], *, to_stdout: bool) -> None:
    """The held-out estimate as a table."""
    rows = [[str(depth), f"{share:.3f}"] for depth, share in enumerate(held_out["survival"], 1)]
    caption = f"τ {held_out['tau']:.2f} over {held_out['rounds']} rounds of {held_out['texts']} held-out texts"
    console.table("survival by depth", ["depth", "survival"], rows, to_stdout=to_stdout, caption=caption)
