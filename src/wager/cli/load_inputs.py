"""Values of the options of `wager bench --url`: times, fields of requests, the key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wager.economics.durations import parse_seconds
from wager.errors import UsageError
from wager.inputs import read_text, shown
from wager.types import SamplingParams

KEY_VARIABLE = "WAGER_API_KEY"
"""The environment variable with the key for a server."""

_MOST_SECONDS = 1e6
_OTHER_FIELDS = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
)
"""Sampling parameters that are sent where they differ from their defaults: not every server knows all of them."""


def seconds(name: str, text: str | None) -> float | None:
    """Of a time above 0; None where none is given."""
    if text is None:
        return None
    found = parse_seconds(name, text)
    if not 0 < found <= _MOST_SECONDS:
        raise UsageError(f"{name} = {shown(text)} is out of range.", "Give a time above 0, such as 60s.")
    return found


def other_fields(params: SamplingParams) -> dict[str, Any]:
    """Those of _OTHER_FIELDS that are not what SamplingParams has by itself."""
    plain = SamplingParams()
    fields = {name: getattr(params, name) for name in _OTHER_FIELDS}
    return {name: value for name, value in fields.items() if value != getattr(plain, name)}


def body_fields(text: str | None) -> dict[str, Any]:
    """The fields that --body adds. UsageError for what is no object, or would replace the prompt or the stream."""
    if text is None:
        return {}
    try:
        fields = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise UsageError(f"--body {shown(text)} is not a JSON object.", """Write it as '{"cache_prompt": false}'.""")
    if "stream" in fields or "messages" in fields or "prompt" in fields:
        raise UsageError(f"--body {shown(text)} replaces what the client itself sets.", "Leave out stream and prompts.")
    return fields


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def read_key(path: Path | None) -> str | None:
    """The key in the file, or in the environment; neither the messages nor the results show it."""
    source = f"the file {path}" if path else f"the environment variable {KEY_VARIABLE}"
    key = read_text(path, "key file", "Give a file with the key alone.") if path else os.environ.get(KEY_VARIABLE)
    if key is None or (not path and not key.strip()):
        return None
    key = key.strip()
    if not key or not key.isascii() or any(letter <= " " or letter == "\x7f" for letter in key):
        raise UsageError(f"The key in {source} is no key.", "A key is one word of ASCII letters.")
    return key
