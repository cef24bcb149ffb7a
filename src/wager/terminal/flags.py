"""Options of commands: how they are written, and those that several verbs share.

Numbers are written in ASCII digits, texts are not blank, files can be written; what is refused here names its option.
Each decorator adds a group of flags to a command and gives it one value: an EngineConfig, SamplingParams or Framing.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from wager.config import (
    DEFAULT_MODEL,
    DTYPES,
    MOST_POSITIONS,
    OPTIONS,
    EngineConfig,
    LearningConfig,
    parse_size,
    read_options,
)
from wager.drafter_spec import DRAFTERS, WORDS, parse_drafters
from wager.economics.options import DEEPEST
from wager.errors import UsageError
from wager.inputs import expand_path, shown
from wager.prompts import (
    BUILTIN,
    SAMPLING_FIELDS,
    Content,
    Prompt,
    as_conversation,
    encode_content,
    is_conversation,
    read_prompts,
    spread,
)
from wager.terminal import console
from wager.types import KVDtype, SamplingParams, VerifyRule

if TYPE_CHECKING:
    from wager.prompts import ChatTokenizer

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

MOST_CONCURRENT = 4096
"""Requests that a measurement may run together."""

_CONFIG_KEY = "wager.cli.config"
"""Key under which click's context holds the options of the --config file."""

SHOW_ALL = "wager.cli.help_all"
"""Key under which click's context holds that help is to show every option."""

_YES_KEY = "wager.cli.yes"
"""Key under which it holds that --yes was given."""

_DIGITS = "[0-9]{1,400}"
_NUMBERS = {
    click.types.IntParamType: ("a whole number", re.compile(r"[+-]?[0-9]{1,40}")),
    click.types.FloatParamType: (
        "a number",
        re.compile(rf"[+-]?({_DIGITS}\.?({_DIGITS})?|\.{_DIGITS})(e[+-]?{_DIGITS})?", re.I),
    ),
}
"""How numbers are written, by click's type: in ASCII digits, without nan, infinity and Python's underscores."""


class InputPath(click.Path):
    """A file to read, FILE in the help; refused at once, by the option's name, if it is not there."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(str(Parsed(expand_path).convert(value, param, ctx)), param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "FILE"


class Count(click.IntRange):
    """A whole number, N in the help."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N"


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A text that `parse` reads; its UsageError names the option."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(str(value))
        except UsageError as error:
            self.fail(f"{error.message} {error.hint}".strip(), param, ctx)


class OutputPath(click.Path):
    """A file to write; refused at once, by the option's name, where that is known to fail. `allow_dash`: or stdout."""

    def __init__(self, *, allow_dash: bool = False) -> None:
        super().__init__(dir_okay=False, allow_dash=allow_dash, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) == "-":
            if not self.allow_dash:
                self.fail("'-' is standard output, which this is not written to: name a file.", param, ctx)
            return console.STDOUT
        path = Parsed(expand_path).convert(value, param, ctx)
        cause = console.obstacle(path)
        if cause:
            self.fail(f"{str(path)!r} cannot be written: {cause}.", param, ctx)
        return super().convert(str(path), param, ctx)


class Verb(click.Command):
    """A command that refuses what click would read as a number though nobody writes it so, texts that are blank, and a
    file to write that another option reads or writes.

    --help shows the options that `main` names, in one text, --help-all every one; without `main` both show all.
    """

    def __init__(self, *args: Any, main: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._main = frozenset(main.split())
        names = {param.name for param in self.params}
        if missing := self._main - names:
            raise LookupError(f"{self.name} has no option {', '.join(sorted(missing))}")

    @property
    def has_more(self) -> bool:
        """Whether --help leaves options out."""
        return bool(self._main)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        found = super().get_params(ctx)
        return [*found[:-1], *_verbosity_flags(), *([_HELP_ALL] if self._main else []), *found[-1:]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        written, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for param in self.params:
            kind, several, _ = (param.metavar or "").partition(",...")
            file = "FILE" in kind or isinstance(param.type, InputPath | OutputPath)
            if order.count(param) > 1 and not param.multiple and (several or file):
                hint = "Separate several values by commas." if several else "Give one."
                raise UsageError(f"{max(param.opts, key=len)} is given {order.count(param)} times.", hint)
            values = written.get(param.name or "")
            for value in values if isinstance(values, list | tuple) else (values,):
                if isinstance(value, str):
                    _check_written(ctx, param, value)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            named = {param.name for param in self.params} if error.message.startswith("Got unexpected extra") else {}
            if "model" in named and not any(isinstance(param, click.Argument) for param in self.params):
                raise click.UsageError(f"{error.message}. A model is given with -m MODEL.", ctx) from None
            raise
        if not ctx.resilient_parsing:
            _check_files(ctx)
        return rest

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = self.help
        if self._main and not ctx.meta.get(SHOW_ALL):
            self.help = (whole or "").partition("\n\n")[0]
        super().format_help_text(ctx, formatter)
        self.help = whole

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        everything = not self._main or ctx.meta.get(SHOW_ALL)
        own = {param.name for param in self.params}
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        shown = [each for each in options if everything or each.name in self._main or each.name not in own]
        records = [record for each in shown if (record := each.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl([(names, _option_help(text, brief=not everything)) for names, text in records])


_BOUNDS = re.compile(r"(?P<least>[\d.]+<=?)?x[<>]=?(?P<most>[\d.]+)")


def _option_help(text: str, *, brief: bool) -> str:
    """An option's help and what stands in brackets behind it; `brief`: its first sentence."""
    words, *extras = re.split(r"(?:^|\s\s)(?=\[)", text)
    if brief:
        words = re.split(r"(?<=\.) (?=[A-Z`])", words)[0]
    return "  ".join(filter(None, [words, *(_without_bounds(extra, any_of_them=brief) for extra in extras)]))


def _without_bounds(extra: str, *, any_of_them: bool) -> str:
    """What stands in brackets behind an option's help without upper bounds that nobody meets, or without any; "" if
    nothing is left."""
    kept = []
    for part in extra[1:-1].split("; "):
        bounds = _BOUNDS.fullmatch(part)
        if bounds is None or not (any_of_them or len(bounds["most"]) > 9):
            kept.append(part)
        elif not any_of_them and bounds["least"]:
            kept.append(f"x>={bounds['least'].rstrip('<=')}")
    return f"[{'; '.join(kept)}]" if kept else ""


def _set_verbosity(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: FBT001 (click's signature)
    if value:
        console.set_verbosity(1 if param.name == "verbose" else -1)


def _help_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:  # noqa: FBT001
    if value and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Show every option."
)


def _verbosity_flags() -> list[click.Parameter]:
    settings: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True, "callback": _set_verbosity}
    return [
        click.Option(["-v", "--verbose"], help="Say more: what is loaded, and what it takes.", **settings),
        click.Option(["-q", "--quiet"], help="Print results, warnings and errors alone.", **settings),
    ]


_TEXTS = ("prompt", "stop", "system")
"""Options whose text may be any."""

_NO_FILES = (*_TEXTS, "drafter", "policy", "policies", "objective", "tenant", "user")
"""Options whose text never names a file, though there may be one of that name."""


def _check_written(ctx: click.Context, param: click.Parameter, value: str) -> None:
    for kind, (noun, pattern) in _NUMBERS.items():
        if isinstance(param.type, kind) and not pattern.fullmatch(value.strip()):
            raise click.BadParameter(f"{shown(value)} is not {noun}.", ctx, param)
    if param.name not in _TEXTS and not value.strip():
        raise click.BadParameter(f"{value!r} is empty.", ctx, param)


def _check_files(ctx: click.Context) -> None:
    """Refuse a file that is written and is that of another option: one of the two would take the other's place."""
    files: dict[str, click.Parameter] = {}
    for param in sorted(ctx.command.params, key=lambda param: isinstance(param.type, OutputPath)):
        written, value = isinstance(param.type, OutputPath), ctx.params.get(param.name or "")
        for each in value if isinstance(value, tuple) else (value,):
            if not isinstance(each, str | Path) or param.name in _NO_FILES:
                continue
            for path in each.split(",") if isinstance(each, str) else (str(each),):
                if not os.path.isfile(path) and (os.path.exists(path) or not written):
                    continue  # a device, a pipe, or no file
                other = files.setdefault(os.path.realpath(path), param)
                if written and other is not param:
                    raise click.BadParameter(f"{path!r} is that of {other.get_error_hint(ctx)}, too.", ctx, param)


def given() -> dict[str, str]:
    """The options and arguments on the command line: as they are written, by the names of their values."""
    context, written = click.get_current_context(), dict[str, str]()
    for param in context.command.params:
        name = param.name or ""
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            denied = param.secondary_opts and context.params.get(name) is False
            written[name] = max(param.secondary_opts if denied else param.opts, key=len)
    return written


def wrote(name: str) -> bool:
    """Whether the option whose value has that name is on the command line."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse(names: Iterable[str], where: str, hint: str = "Leave it out.") -> None:
    """UsageError for an option on the command line whose value has one of these `names`: it has no effect, `where` says
    with or without what."""
    refused = {*names}
    for name, word in given().items():
        if name in refused:
            raise UsageError(f"{word} has no effect {where}.", hint)


def _refuse_without_drafter(drafters: Sequence[str], values: Mapping[str, Any]) -> None:
    """UsageError for an option of drafting that was given on the command line where no drafter is."""
    if any(drafter.strip() != "none" for drafter in drafters):
        return
    for name in ("depth", "policy", "objective", "draft_threads"):
        if values.get(name) and wrote(name):
            raise UsageError(
                f"--{name.replace('_', '-')} {values[name]} has no effect with --drafter none.",
                "Leave it out, or name a drafter.",
            )


def _refuse_without_folder(values: Mapping[str, Any]) -> None:
    """UsageError for an option of learning that was given on the command line without a folder."""
    if not values.get("learn"):
        refuse(LEARNING_FLAGS, "without --learn", "Give the folder.")


def _read_config(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Make the options of a file the defaults of the command's flags; keep all of them for options without a flag."""
    if path is None:
        return
    options = read_options(path)
    if options.get("n", 1) != 1:
        raise UsageError(f"{path}: n = {options['n']}, and commands give one answer.", "Leave it out.")
    defaults = dict(options)
    for param in ctx.command.params:
        name = param.name or ""
        if isinstance(param, click.Option) and param.multiple and not isinstance(defaults.get(name, []), list):
            defaults[name] = (defaults[name],)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    ctx.meta[_CONFIG_KEY] = options


def options_of_file(groups: Collection[str]) -> dict[str, Any]:
    """The options of these groups in the --config file."""
    options = click.get_current_context().meta.get(_CONFIG_KEY, {})
    return {name: value for name, value in options.items() if OPTIONS[name] in groups}


def add(options: list[Function]) -> Decorator:
    """One decorator out of several options, listed in the order the help shows them."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _complete_model(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    from wager.models import hub
    from wager.models.names import named_models

    names = [*hub.KNOWN, *(model.name for model in hub.stored_models()), *named_models()]
    found = [name for name in dict.fromkeys(names) if name.lower().startswith(begun.lower())]
    return [CompletionItem(name) for name in found] or [CompletionItem(begun, type="file")]


def _complete_drafter(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[CompletionItem]:
    before, comma, last = begun.rpartition(",")
    found = [name for name in (*WORDS, *DRAFTERS) if name.startswith(last)]
    return [CompletionItem(before + comma + name) for name in found]


def drafter_flag(*, several: bool = False, default: Any = "auto", further: Collection[str] = ()) -> Function:
    """`further`: names that a command knows besides those of an engine, alone; they are for proofs, and help does not
    show them."""

    def check(text: str) -> str:
        """Refuse drafter names and arguments that do not exist."""
        if text not in further:
            parse_drafters(text)
        return text

    return click.option(
        "--drafter",
        type=Parsed(check),
        metavar="NAME[:ARG],...",
        multiple=several,
        default=default,
        show_default="none, ngram, and two that guess wrong on purpose" if further else True,
        shell_complete=_complete_drafter,
        help="Who guesses, one or several with commas: `wager drafters` explains them."
        + " Repeat it to try several." * several,
    )


def _note_yes(ctx: click.Context, _param: click.Parameter, value: bool) -> None:  # noqa: FBT001
    ctx.meta[_YES_KEY] = value


yes_flag = click.option(
    "-y",
    "--yes",
    is_flag=True,
    expose_value=False,
    callback=_note_yes,
    help="Fetch what --drafter auto offers without asking.",
)


def says_yes() -> bool:
    """Whether --yes was given."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_YES_KEY))


config_flag = click.option(
    "--config",
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    type=InputPath(),
    help='TOML file of options, such as drafter = "ngram" or max-tokens = 64; flags override it.',
)

ENGINE_FLAGS: Mapping[str, Function] = {
    "model": click.option(
        "-m",
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        shell_complete=_complete_model,
        help="Directory, GGUF file, or name, such as qwen3:4b; fetched if it is not here.",
    ),
    "drafter": drafter_flag(),
    "depth": click.option(
        "--depth",
        type=Count(0, DEEPEST),
        help="Guesses per step; 0 makes none. Without it the policy decides at every step.",
    ),
    "policy": click.option(
        "--policy",
        metavar="NAME",
        help="How many tokens are guessed: adaptive (by expected gain "
        "and cost), threshold[:P] (by likelihood alone) or fixed.  [default: adaptive; with --depth fixed]",
    ),
    "objective": click.option(
        "--objective",
        default="throughput",
        metavar="GOAL",
        help="Of the adaptive policy: throughput, latency, or slo:TIME (per token, such as slo:20ms).",
    ),
    "verify": click.option(
        "--verify",
        type=click.Choice(get_args(VerifyRule)),
        default="match",
        help="Which guesses are accepted. match keeps every byte; rejection, block (of chains) "
        "and traversal (of trees too) keep the distribution of sampled text.",
    ),
    "dtype": click.option(
        "--dtype",
        type=click.Choice([*DTYPES, "bfloat16"]),
        default="auto",
        help="Format of the weights: auto multiplies a GGUF file in its own types and other models in bf16; q8 and "
        "q4 quantise what has more bits.",
    ),
    "kv_dtype": click.option(
        "--kv-dtype",
        type=click.Choice(get_args(KVDtype)),
        default="bf16",
        help="Type of cached keys and values. q8 takes half the memory: int8, and a scale for each.",
    ),
    "chat_template": click.option(
        "--chat-template",
        type=InputPath(),
        metavar="FILE",
        help="A Jinja template in place of the model's own, or where it has none.",
    ),
    "threads": click.option("--threads", type=Count(min=1), help="Without it one per physical core."),
    "draft_threads": click.option(
        "--draft-threads",
        type=Count(min=0),
        default=0,
        help="Threads of a drafter that runs a model, which then drafts while the target "
        "verifies, on cores that --threads leaves. 0: they take turns.",
    ),
    "memory": click.option(
        "--memory",
        type=Parsed(parse_size),
        metavar="SIZE",
        help="Limit for weights, cache and drafters, such as 4GiB. Without it most of the free memory.",
    ),
    "max_context": click.option(
        "--max-context",
        type=Count(2, MOST_POSITIONS),
        help="Tokens of prompt and answer together. Without it the model's own limit.",
    ),
    "max_sequences": click.option(
        "--max-sequences",
        type=Count(min=1),
        help="Choices of requests that run at once; others wait. Without it 64, or fewer where their recurrent states "
        "would take more than an eighth of the memory.",
    ),
}
"""Flags of the engine by option, in the order the help shows them."""


LEARNING_FLAGS: Mapping[str, Function] = {
    "learn": click.option(
        "--learn",
        type=Parsed(expand_path),
        metavar="FOLDER",
        help="Learn from answers: later guesses come from them too, also after a restart. docs/privacy.md says what "
        "the folder holds.",
    ),
    "learn_prompts": click.option("--learn-prompts", is_flag=True, help="Learn from prompts as well."),
    "learn_days": click.option(
        "--learn-days",
        type=click.FloatRange(0, 36500, min_open=True),
        default=LearningConfig().learn_days,
        metavar="DAYS",
        help="Forget what is older.",
    ),
    "learn_bytes": click.option(
        "--learn-bytes",
        type=Parsed(functools.partial(parse_size, name="learn_bytes")),
        default="256MiB",
        metavar="SIZE",
        help="Of each tenant's texts; 8 bytes a token. The texts used least recently leave first.",
    ),
}
"""Flags of commands that may learn, by option."""


def engine_flags(
    *,
    drafter: Function | None = None,
    prefix_cache: bool = True,
    only: Collection[str] | None = None,
    learning: bool = False,
) -> Decorator:
    """Flags of the engine, or `only` those named and `drafter`; the command receives `config`.

    `drafter` replaces the flag of that name; if it may be repeated, the command receives `drafters` beside a config
    that has none of them. `prefix_cache` is the default of the flag of that name. `learning`: with LEARNING_FLAGS.
    """
    reuse = click.option(
        "--prefix-cache/--no-prefix-cache", default=prefix_cache, help="Reuse cached keys and values of equal prefixes."
    )
    flags = {**ENGINE_FLAGS, "drafter": drafter or ENGINE_FLAGS["drafter"], "prefix_cache": reuse}
    flags |= LEARNING_FLAGS if learning else {}
    chosen = [name for name in flags if only is None or name in only or (name == "drafter" and drafter)]
    groups = ("model", "capacity") if only else ("model", "capacity", "speculation", *(["learning"] * learning))

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, drafter: str | tuple[str, ...] = "none", **values: Any) -> Any:
            options = {**options_of_file(groups), **{key: values.pop(key) for key in chosen if key != "drafter"}}
            drafters = drafter if isinstance(drafter, tuple) else (drafter,)
            _refuse_without_drafter(drafters, options)
            _refuse_without_folder(options)
            if drafters is drafter:
                values["drafters"], drafter = drafters, "none"
            return function(config=EngineConfig.from_options(**{**options, "drafter": drafter}), **values)

        own = [*(flags[name] for name in chosen), *([] if only else [yes_flag]), config_flag]
        return add(own)(command)

    return decorate


SAMPLING_HELP: Mapping[str, tuple[str, str]] = {
    "top_p": ("P", "Keep the likeliest tokens that hold this much probability."),
    "top_k": ("K", "Keep the K likeliest tokens; 0 keeps all."),
    "min_p": ("P", "Keep tokens at least P times as likely as the likeliest."),
    "repetition_penalty": ("X", "Above 1 makes tokens of the prompt and the answer less likely."),
    "presence_penalty": ("X", "Subtracted from the logit of every token already in the answer."),
    "frequency_penalty": ("X", "Subtracted once for every time a token is already in the answer."),
}
"""Option -> its placeholder and help; types and defaults are those of SamplingParams."""


def sampling_flags(*, max_tokens: int = 256, temperature: float | None = 0.0, seed: int | None = None) -> Decorator:
    """Flags of one request; the command receives `params`. With `temperature` None it receives `sampled` too:
    whether --temperature was given."""
    plain, tells_sampled = SamplingParams(), temperature is None
    options = [
        click.option(
            "--temperature",
            "--temp",
            type=float,
            default=temperature,
            metavar="T",
            help="0 always takes the most likely token.",
        ),
        *(
            click.option(
                f"--{name.replace('_', '-')}",
                type=type(getattr(plain, name)),
                default=getattr(plain, name),
                metavar=metavar,
                help=text,
            )
            for name, (metavar, text) in SAMPLING_HELP.items()
        ),
        click.option("--seed", type=int, default=seed, metavar="N", help="Equal seeds give equal text."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. May be repeated."),
        click.option("-n", "--max-tokens", type=int, default=max_tokens, metavar="N", help="Longest answer."),
    ]

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, temperature: float | None, **values: Any) -> Any:
            given = {name: values.pop(name) for name in (*SAMPLING_HELP, "seed", "stop", "max_tokens")}
            params = SamplingParams(**{**options_of_file(("sampling",)), **given, "temperature": temperature or 0.0})
            own = any("temperature" in prompt.fields for prompt in values.get("prompts", ()))
            if params.greedy and not tells_sampled and not own:
                _note_without_effect(params)
            if tells_sampled:
                values["sampled"] = temperature is not None
            return function(params=params, **values)

        return add(options)(command)

    return decorate


def _note_without_effect(params: SamplingParams) -> None:
    """Say which options on the command line say nothing of greedy text."""
    names = [name for name in ("top_p", "top_k", "min_p", "seed") if wrote(name)]
    if names:
        words = " and ".join(f"--{name.replace('_', '-')} {getattr(params, name)}" for name in names)
        console.say(f"note: no effect at temperature 0: {words}. --temp 0.8, for example, samples.")


@dataclass(frozen=True, slots=True)
class Framing:
    """How a prompt becomes tokens: through the model's chat template, or raw."""

    raw: bool = False
    system: str | None = None

    def frame(self, content: Content) -> Content:
        """A conversation, or raw the text itself; token ids as they are. UsageError for a conversation that is to be
        raw."""
        if self.raw and is_conversation(content):
            raise UsageError("--raw is for texts and token ids, and there are conversations.", "Leave it out.")
        return content if self.raw else as_conversation(content, system=self.system)

    def encode(self, tokenizer: ChatTokenizer, content: Content) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return encode_content(tokenizer, self.frame(content))


def framing_flags(function: Function) -> Function:
    """--raw and --system; the command receives `framing`."""

    @click.option(
        "--raw",
        is_flag=True,
        help="Give the prompt to the model as it is, without its chat template; "
        "control tokens written out in it, such as <|im_end|>, are parsed.",
    )
    @click.option("--system", metavar="TEXT", help="System message. Without it the template's own, if it has one.")
    @functools.wraps(function)
    def command(*, raw: bool, system: str | None, **values: Any) -> Any:
        if raw and system is not None:
            raise click.UsageError("--raw uses no chat template, so there is no system message. Give one of the two.")
        return function(framing=Framing(raw, system), **values)

    return command


def prompts_flags(*, limit: int | None = None) -> Decorator:
    """[FILE] or --prompts FILE, and --limit; the command receives the chosen `prompts`."""

    def decorate(function: Function) -> Function:
        @click.argument("file", required=False, metavar="[FILE]", type=InputPath())
        @click.option("--prompts", "path", type=InputPath(), help="The same as FILE.")
        @click.option(
            "--limit", type=Count(1, 1_000_000), default=limit, help="Use N prompts, spread over the categories."
        )
        @functools.wraps(function)
        def command(*, file: Path | None, path: Path | None, limit: int | None, **values: Any) -> Any:
            if file and path:
                raise click.UsageError("The prompt file is given twice: once alone and once with --prompts.")
            prompts = as_given(spread(read_prompts(file or path or BUILTIN), limit))
            unused = {name for prompt in prompts for name in prompt.fields} - {*SAMPLING_FIELDS}
            if unused and not values.get("url"):
                console.say(f"Only a server is sent their {', '.join(sorted(unused))} (bench --url).")
            return function(prompts=prompts, **values)

        return command

    return decorate


def as_given(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without the fields for which the command line has an option: that counts for all."""
    names = [name for name in SAMPLING_FIELDS if wrote(name)]
    return [prompt.without(*names) for prompt in prompts]


receipt_key_flag = click.option(
    "--receipt-key",
    "key_path",
    type=InputPath(),
    help="Sign receipts with the Ed25519 key of a PEM file; pip install 'wager[receipts]'.",
)

concurrency_flag = click.option(
    "--concurrency", type=Count(1, MOST_CONCURRENT), default=1, help="Requests that run together."
)

json_flag = click.option(
    "--json",
    "json_path",
    type=OutputPath(allow_dash=True),
    metavar="PATH",
    help="Write the results as JSON; - is stdout.",
)
