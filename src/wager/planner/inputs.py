"""What the options of `wager plan` and `wager replay` name: numbers, files, models, devices and expert routing.

A wrong value is an error that names it. Reads configuration files; of weights only what tells one model from another.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wager.arch import ModelSpec, Precision, find_format, find_model, gguf_precision, read_config, read_gguf
from wager.arch.config_keys import ConfigKeys
from wager.errors import ModelError, UsageError, WagerError
from wager.inputs import expand_path, read_text, shown
from wager.models import hub
from wager.models.gguf import open_gguf
from wager.planner.devices import Device, find_device
from wager.planner.routing import ExpertRouting
from wager.terminal import console

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([km]?)", re.IGNORECASE)
_MULTIPLE = {"": 1, "k": 1 << 10, "m": 1 << 20}
_MOST_DIGITS = 15
"""A longer number is a slip of the keyboard, and need not be converted to say so."""


def split(name: str, text: str) -> list[str]:
    """The items of a list; UsageError for an empty one, as after a trailing comma."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(
            f"{name} = {shown(text)} has an empty item.", "Write values separated by commas, without one at the end."
        )
    return words


def parse_integers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers of zero or more, separated by commas, each once, in order. k and m multiply by 1024 and 1024^2, as
    contexts are named: 128k is 131072."""
    return tuple(dict.fromkeys(_integer(name, word) for word in split(name, text)))


def _integer(name: str, word: str) -> int:
    match = _SIZE.fullmatch(word)
    value = float(match[1]) * _MULTIPLE[match[2].lower()] if match and len(word) <= _MOST_DIGITS else -1.0
    if value < 0 or value != int(value):
        raise UsageError(
            f"{name} = {shown(word)} is out of range.",
            f"Write --{name} 1,2,4 with whole numbers; k is 1024 and m is 1024 k, so 128k is 131072.",
        )
    return int(value)


def number(text: str) -> float:
    """The number that a text writes; nan, which no range contains, for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# ---- files -----------------------------------------------------------------------------------------------------------


def read_json(path: Path, *, hint: str = "Check the path.") -> Mapping[str, Any]:
    """The object in a JSON file. UsageError with `hint` if there is no file, ModelError if it holds something else."""
    if not path.exists():
        hint = "Write a probability as a fraction, such as 0.75." if str(path).endswith("%") else hint
        raise UsageError(f"There is no file {path}.", hint)
    try:
        values = json.loads(read_text(path, "file", "It must hold JSON."), parse_int=_json_integer)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "It must hold JSON.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "It must begin with a brace.")
    return values


def _json_integer(text: str) -> int | float:
    """Very long numbers as floats, which checks of ranges refuse."""
    return int(text) if len(text) <= _MOST_DIGITS else float(text)


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_origin(noted: ConfigKeys, model: str, spec: ModelSpec, *, allowed: bool) -> None:
    """Whether the figures of a file, which notes whose they are, were measured with `model`: with its weights and
    tokenizer if they are on this machine, else with its sizes. UsageError for another model, a warning where it is
    `allowed`. A model without a fingerprint, as files of earlier releases and of other servers name it, is compared by
    its sizes if it is a published one; a line says that it was not compared further."""
    from wager.models.opening import model_sizes, open_model, trained_for_another  # few plans need it

    path, name = noted.where, Path(model).name
    measured, sizes = noted.text("model"), noted.text("target_sizes")
    if measured is None:
        return
    found = None
    if not noted.text("target_fingerprint"):
        with suppress(WagerError):  # of a name that is not published
            sizes = sizes or model_sizes(find_model(Path(measured).name))
        if not sizes or sizes == model_sizes(spec):
            console.say(f"{path} names its model, {measured}, without a fingerprint: not compared with {name}.")
            return
    if sizes and sizes != model_sizes(spec):
        found = f"for {measured}, {sizes}, and {name} has {model_sizes(spec)}"
    else:
        with suppress(WagerError):  # of a configuration without weights
            if hub.is_random(model) or hub.find(model):
                found = trained_for_another(noted, *open_model(model)[1:], name)
    if found and not allowed:
        raise UsageError(f"{path} was measured {found}.", "Measure it with that model, or allow it with --any-model.")
    if found:
        console.warn(f"{path} was measured {found}.")


# ---- models and devices ----------------------------------------------------------------------------------------------


def find_plan_model(model: str, precision: Precision | None = None) -> ModelSpec:
    """A published model by name, or the shape of a config.json, a directory, a GGUF file or a model by name on this
    machine. With a `precision` the number formats of a configuration need not be known. ModelError if there is none."""
    if not model.strip():
        raise ModelError("The name of the model is empty.", "Give a name, a config.json, its directory or a GGUF file.")
    path = expand_path(model)
    if path.is_file() and path.suffix == ".json":
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return read_config(_model_config(path), name=name, precision=precision)
    local = None
    if not path.exists() and not model.startswith(("/", ".", "~")) and not model.endswith((".gguf", ".json")):
        try:
            return find_model(model)
        except UsageError as error:
            with suppress(ModelError):  # of a name that is none of the hub's either
                local = hub.find(model)
            if local is None:
                raise ModelError(error.message, error.hint) from error  # as `wager run` has it
    if model.endswith(".json"):
        raise ModelError(f"There is no file {model}.", "Give a config.json, its directory, a GGUF file or a name.")
    local = local or hub.find(model)
    if local is not None and local.is_dir():
        name = local.resolve().name if path.exists() else path.name  # of the hub's cache it is a hash
        return read_config(_model_config(local / "config.json"), name=name, precision=precision)
    file = open_gguf(path if local is None else local)
    return read_gguf(file.metadata, file.shapes, name=path.name, precision=gguf_precision(file.sizes))


_QUANTISATIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of modelopt, GPTQ and AWQ that older checkpoints have beside a config.json without quantization_config."""


def _model_config(path: Path) -> Mapping[str, Any]:
    values = read_json(path)
    beside = next((path.parent / name for name in _QUANTISATIONS if (path.parent / name).is_file()), None)
    if beside is None or values.get("quantization_config") is not None:
        return values
    return {**values, "quantization_config": read_json(beside)}


def with_formats(model: ModelSpec, precision: str | None, cache: str | None, dispatch: str | None = None) -> ModelSpec:
    """The model in other number formats than it was published in. `dispatch` is OUT[:BACK], the formats of rows on
    their way to experts on other devices and back."""
    if precision is not None and not model.sparse and precision.partition(":")[2].partition(":")[0].strip():
        raise UsageError(
            f"precision = {precision!r} gives experts a format, and {model.name} has no experts.",
            "Write WEIGHTS alone, or WEIGHTS::HEAD for a head of its own.",
        )
    chosen = model.precision
    if precision is not None:
        chosen = replace(Precision.parse(precision), cache=chosen.cache, state=chosen.state)
    if cache is not None:
        chosen = replace(chosen, cache=find_format(cache).bytes)
    if dispatch is not None:
        out, _, back = dispatch.partition(":")
        try:
            size = find_format(out).bytes
            combine = find_format(back).bytes if back else size
        except UsageError as error:
            raise UsageError(f"dispatch = {shown(dispatch)}: {error.message}", error.hint) from None
        chosen = replace(chosen, dispatch=size, combine=combine)
    return replace(model, precision=chosen)


def find_hardware(name: str) -> Device:
    """A device of the table, or one described in a JSON file."""
    if not name.endswith(".json"):
        return find_device(name)
    values = read_json(expand_path(name))
    try:
        return Device.from_dict(values)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.hint) from error


def read_popularity(path: Path) -> tuple[ExpertRouting, ConfigKeys]:
    """How likely a token is to choose each expert, from a JSON file, with the
    locality that was measured beside it (1 if none was); and what the file notes of its model."""
    values = read_json(expand_path(str(path)))
    shares, locality = values.get("popularity"), values.get("locality")
    if not isinstance(shares, list) or not all(is_number(share) and 0 <= share <= 1 for share in shares):
        raise UsageError(
            f"{path} gives no popularity.", 'It holds {"popularity": [...]}, a probability for each expert of a layer.'
        )
    if locality is not None and not (is_number(locality) and 0 < locality <= 1):
        raise UsageError(f"locality = {locality!r} in {path} is out of range.", "It is above 0 and at most 1.")
    routing = ExpertRouting(tuple(float(share) for share in shares), 1.0 if locality is None else locality)
    return routing, ConfigKeys(values, where=str(path))
