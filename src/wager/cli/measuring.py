"""What commands that measure have in common: requests of a prompt file, the conditions that a result states, progress,
how long it will take, and the key for a server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wager.config import EngineConfig
from wager.errors import UsageError
from wager.inputs import read_text
from wager.prompts import SAMPLING_FIELDS, Prompt
from wager.terminal import console, flags
from wager.types import OutputDelta, Request, SamplingParams

if TYPE_CHECKING:
    from wager.loading.load import LoadedEngine
    from wager.prompts import ChatTokenizer

KEY_VARIABLE = "WAGER_API_KEY"
"""The environment variable with the key for a server."""

key_flag = click.option(
    "--api-key-file",
    type=flags.InputPath(),
    help=f"The server's key.  [default: the environment variable {KEY_VARIABLE}, if set]",
)


def settings_of(
    config: EngineConfig, params: SamplingParams, framing: flags.Framing, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Every option of a measurement, by its flat name."""
    return {**config.as_options(), **sampling_of(prompts, params), **asdict(framing)}


def sampling_of(prompts: Sequence[Prompt], params: SamplingParams) -> dict[str, Any]:
    """How the prompts are sampled; None for what they themselves set differently."""
    found = asdict(params)
    for name in SAMPLING_FIELDS:
        values = [prompt.fields.get(name, found[name]) for prompt in prompts]
        found[name] = values[0] if all(value == values[0] for value in values) else None
    return found


def card_of(config: EngineConfig, engine: LoadedEngine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a measurement: model, kernels, machine, settings, versions."""
    from wager.bench.machine import card

    kernels = {"name": engine.kernels.name, "reason": engine.kernels.reason}
    return card(model=config.model.model, kernels=kernels, settings=settings)


def to_requests(
    prompts: Sequence[Prompt], tokenizer: ChatTokenizer, *, framing: flags.Framing, params: SamplingParams
) -> list[Request]:
    """One request per prompt, by the prompt's id, with `params` where it says nothing itself; '#' in an id is replaced:
    the engine numbers choices with it."""
    return [
        Request(str(prompt.id).replace("#", "-"), framing.encode(tokenizer, prompt.content), prompt.params(params))
        for prompt in prompts
    ]


def longest_seconds(engine: LoadedEngine, requests: Sequence[Request], *, together: int, rows: int = 1) -> float:
    """What answers of the full length would take, so many at once, of so many rows a step each, by the latency model;
    guesses that are accepted save some of it."""
    together, most = min(together, len(requests)), engine.scheduler.max_context
    prompts = sum(len(each.prompt) for each in requests)
    tokens = sum(min(each.params.max_tokens, most - len(each.prompt)) for each in requests)
    context = (prompts + tokens // 2) // len(requests)
    step = engine.step_seconds(rows * together, requests=together, context=context)
    return prompts * engine.step_seconds(64, requests=1, context=context) / 64 + tokens * step / together


def duration(seconds: float) -> str:
    """About how long, as one says it."""
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.1f} {name}"
    return f"about {max(1, round(seconds))} s"


def count_answers(update: console.Update, activity: str, total: int) -> Callable[[OutputDelta], None]:
    """A function to call with every delta, which shows how many answers have finished."""
    done = 0

    def count(delta: OutputDelta) -> None:
        nonlocal done
        if delta.finish_reason:
            done += 1
            update(activity, min(done, total), total)

    return count


def read_key(path: Path | None) -> str | None:
    """The key in the file, or in the environment; neither the messages nor the results show it."""
    source = f"the file {path}" if path else f"the environment variable {KEY_VARIABLE}"
    key = read_text(path, "key file", "Give a file with the key alone.") if path else os.environ.get(KEY_VARIABLE)
    if key is None or (not path and not key.strip()):
        return None
    if not re.fullmatch(r"[!-~]+", key.strip()):
        raise UsageError(f"The key in {source} is no key.", "A key is one word of ASCII letters.")
    return key.strip()
