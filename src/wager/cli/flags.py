"""The flags that mean the same for every verb, defined once.

Each decorator adds a group of flags to a command and hands it one value: an EngineConfig, SamplingParams or Framing.
Knows no engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import click

from wager.bench.workload import builtin, read_prompts, spread
from wager.config import DEFAULT_MODEL, EngineConfig
from wager.draft import names, roster
from wager.errors import UsageError
from wager.types import SamplingParams, VerifyRule

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str) -> int:
    """Bytes of 4GiB, 512MiB, 4G or plain bytes; all units are powers of 1024. Raises click.BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found or not float(found[1]):
        raise click.BadParameter(f"{text!r} is not an amount of memory; write 4GiB or 512MiB.")
    return int(float(found[1]) * _UNITS[found[2]])


def _size_or_none(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else size(value)


def _known_drafter(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
    """Drafters that exist; whether an argument fits is found out when one is loaded."""
    for name in value if isinstance(value, tuple) else (value,):
        try:
            roster(name)
        except UsageError as error:
            raise click.BadParameter(f"{error.message} {error.hint}") from error
    return value


def add(options: list[Function]) -> Decorator:
    """One decorator out of several options, listed in the order the help shows them."""

    def decorate(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def drafter_flag(*, several: bool = False, default: Any = "auto") -> Function:
    listed = "; ".join(f"{name}: {does}" for name, does in names().items())
    again = " Repeat it to try several." if several else ""
    return click.option(
        "--drafter", callback=_known_drafter, metavar="NAME[:ARG],...", multiple=several, default=default,
        show_default=True, help=f"Who guesses, one or several with commas between. {listed}.{again}",
    )  # fmt: skip


def engine_flags(
    *, drafter: Function | None = None, prefix_cache: bool = True, only: Collection[str] | None = None
) -> Decorator:
    """Flags that decide what the engine is, or `only` those named; the command receives `config`.

    A `drafter` option that may be repeated stays the command's own, as `drafters`.
    """
    options = {
        "model": click.option("--model", default=DEFAULT_MODEL, show_default=True, metavar="MODEL",
                     help="Directory, GGUF file, or name (fetched if it is not here)."),
        "drafter": drafter or drafter_flag(),
        "depth": click.option("--depth", type=click.IntRange(min=0), metavar="N",
                     help="Guesses per step; 0 makes none. Without it the policy decides at every step."),
        "policy": click.option("--policy", metavar="NAME", help="Who decides how far to guess: adaptive (by what it "
                     "costs and brings), threshold[:P] (by likelihood alone) or fixed.  [default: adaptive, or fixed "
                     "with --depth]"),
        "objective": click.option("--objective", default="throughput", show_default=True, metavar="GOAL",
                     help="Of the adaptive policy: throughput, latency, or slo:TIME (per token, such as slo:20ms)."),
        "verify": click.option("--verify", type=click.Choice(get_args(VerifyRule)), default="match", show_default=True,
                     help="Which guesses are accepted. match keeps every byte; rejection and block keep the "
                     "distribution of sampled text."),
        "kernels": click.option("--kernels", type=click.Choice(["auto", "native", "reference"]), default="auto",
                     show_default=True, help="Who computes; see `wager doctor`."),
        "threads": click.option("--threads", type=click.IntRange(min=1), metavar="N",
                     help="Without it one per physical core."),
        "memory": click.option("--memory", callback=_size_or_none, metavar="SIZE",
                     help="What weights, cache and drafter may take, such as 4GiB. Without it most of what is free."),
        "max_context": click.option("--max-context", type=click.IntRange(min=2), metavar="N",
                     help="Tokens of prompt and answer together. Without it the model's own limit."),
        "prefix_cache": click.option("--prefix-cache/--no-prefix-cache", default=prefix_cache, show_default=True,
                     help="Reuse what was computed for an equal beginning."),
    }  # fmt: skip
    chosen = [name for name in options if only is None or name in only or name == "drafter"]

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, drafter: str | tuple[str, ...], **values: Any) -> Any:
            given = {key: values.pop(key) for key in chosen if key != "drafter"}
            if isinstance(drafter, tuple):
                return function(config=EngineConfig(**given), drafters=drafter, **values)
            return function(config=EngineConfig(**given, drafter=drafter), **values)

        return add([options[name] for name in chosen])(command)

    return decorate


def sampling_flags(*, max_tokens: int = 256, temperature: float | None = 0.0, seed: int | None = None) -> Decorator:
    """Flags of one request; the command receives `params`. With `temperature` None it receives `sampled` too:
    whether the user asked for a temperature."""
    options = [
        click.option("--temperature", type=float, default=temperature, show_default=temperature is not None,
                     metavar="T", help="0 always takes the most likely token."),
        click.option("--top-p", type=float, default=1.0, show_default=True, metavar="P",
                     help="Keep the likeliest tokens that hold this much probability."),
        click.option("--top-k", type=int, default=0, show_default=True, metavar="K",
                     help="Keep the K likeliest tokens; 0 keeps all."),
        click.option("--min-p", type=float, default=0.0, show_default=True, metavar="P",
                     help="Keep tokens at least P times as likely as the likeliest."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, metavar="X",
                     help="Above 1 makes every token seen before less likely."),
        click.option("--presence-penalty", type=float, default=0.0, show_default=True, metavar="X",
                     help="Subtracted from the logit of every token answered before."),
        click.option("--frequency-penalty", type=float, default=0.0, show_default=True, metavar="X",
                     help="Subtracted once for every time a token was answered before."),
        click.option("--seed", type=int, default=seed, show_default=seed is not None, metavar="N",
                     help="Equal seeds give equal text."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. May be repeated."),
        click.option("--max-tokens", type=int, default=max_tokens, show_default=True, metavar="N",
                     help="Longest answer."),
    ]  # fmt: skip
    keys = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, temperature: float | None, stop: tuple[str, ...], max_tokens: int, **values: Any) -> Any:
            chosen = {key: values.pop(key) for key in keys}
            params = SamplingParams(temperature=temperature or 0.0, stop=stop, max_tokens=max_tokens, **chosen)
            if defaulted:
                values["sampled"] = temperature is not None
            return function(params=params, **values)

        return add(options)(command)

    defaulted = temperature is None
    return decorate


class Templated(Protocol):
    """What framing needs of a tokenizer."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Framing:
    """How a prompt becomes tokens: through the model's chat template, or raw."""

    raw: bool = False
    system: str | None = None

    def encode(self, tokenizer: Templated, prompt: str) -> tuple[int, ...]:
        if self.raw:
            return tuple(tokenizer.encode(prompt))
        return self.encode_chat(tokenizer, [{"role": "user", "content": prompt}])

    def encode_chat(self, tokenizer: Templated, messages: list[dict[str, str]]) -> tuple[int, ...]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = tokenizer.chat([*first, *messages], add_generation_prompt=True)
        return tuple(tokenizer.encode(text, special=False))  # the template wrote the special tokens


def framing_flags(function: Function) -> Function:
    """--raw and --system; the command receives `framing`."""

    @functools.wraps(function)
    def command(*, raw: bool, system: str | None, **values: Any) -> Any:
        if raw and system is not None:
            raise click.UsageError("--raw uses no template, so --system has no place in it. Give one of the two.")
        return function(framing=Framing(raw, system), **values)

    return add([
        click.option("--raw", is_flag=True, help="Give the prompt to the model as it is, without its chat template."),
        click.option("--system", metavar="TEXT", help="System message. Without it the template's own, if it has one."),
    ])(command)  # fmt: skip


def prompts_flags(*, limit: int | None = None) -> Decorator:
    """[FILE] or --prompts FILE, and --limit; the command receives `prompts`, already chosen."""
    options = [
        click.argument("file", required=False, metavar="[FILE]", type=click.Path(path_type=Path, dir_okay=False)),
        click.option("--prompts", "path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
                     help="The same as FILE."),
        click.option("--limit", type=click.IntRange(min=1), default=limit, show_default=limit is not None, metavar="N",
                     help="Use N prompts, spread over the families."),
    ]  # fmt: skip

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, file: Path | None, path: Path | None, limit: int | None, **values: Any) -> Any:
            if file and path:
                raise click.UsageError("The prompt file is given twice: once alone and once with --prompts.")
            found = file or path
            return function(prompts=spread(read_prompts(found) if found else builtin(), limit), **values)

        return add(options)(command)

    return decorate


concurrency_flag = click.option(
    "--concurrency", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="Requests that run together.",
)  # fmt: skip

json_flag = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), metavar="PATH",
    help="Write the results as JSON; - writes them to stdout.",
)  # fmt: skip
