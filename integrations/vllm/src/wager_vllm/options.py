"""The plugin's options: from the file that WAGER_VLLM_CONFIG names (TOML or JSON), and from WAGER_VLLM_* over it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from wager.drafter_spec import DrafterSpec, parse_drafters
from wager.economics.options import DEEPEST, Objective, parse_objective
from wager.errors import UsageError
from wager.inputs import did_you_mean, read_text, shown

PREFIX = "WAGER_VLLM_"
APART = frozenset({"CONFIG", "OPTIONAL", "PYTHON", "PATIENCE", "METRICS_FOLDER"})
"""Names after the prefix that are no options: the file, what is done about an unknown version, what tests read, and
where the processes of one vLLM leave their figures."""

_HINT = "docs/vllm.md of wager lists the options."
_READS_TEXT = frozenset({"ngram", "suffix", "store", "recycle", "prediction"})
"""Drafters that need neither a model nor the target's states."""


def _drafters(text: str) -> str:
    for spec in parse_drafters(text):
        name = str(spec)
        if spec.parts or spec.trees:
            raise UsageError(f"Drafter {name!r} makes trees, and vLLM verifies chains.", "Name drafters of chains.")
        if spec.name not in _READS_TEXT:
            raise UsageError(
                f"Drafter {name!r} runs a model, which vLLM does itself.",
                f"Use one of {', '.join(sorted(_READS_TEXT))}, or vLLM's own method with the scheduler of wager.",
            )
    return text


def _objective(text: str) -> str:
    parse_objective(text)
    return text


def _path(path: Path) -> Path:
    path = path.expanduser()
    if not path.is_file():
        raise UsageError(f"{shown(str(path))} is no file.", "Name one that can be read.")
    return path


File = Annotated[Path, AfterValidator(_path)]


class Options(BaseModel):
    """`drafters`: as wager's --drafter, of those that read text. `corpus`: a file of JSON lines with an `answer` of the
    target and, if known, its `prompt`, that `suffix` and `auto` look in; `store`: the same, built by `wager train
    --kind store`. `max_depth`: most draft tokens of a request in a step, at most vLLM's num_speculative_tokens.
    `memory_mb`: of what is kept of ended requests, all tenants together. `prices`: a calibration's file (None: the one
    that an earlier run left in wager's cache). `measure`: when step times are measured, at the start, in the first
    steps, or never. `objective`: as wager's --objective."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafters: Annotated[str, AfterValidator(_drafters)] = "auto"
    corpus: File | None = None
    store: File | None = None
    max_depth: Annotated[int, Field(ge=1, le=DEEPEST)] = DEEPEST
    memory_mb: Annotated[int, Field(ge=0, le=1 << 20)] = 288
    prices: Path | None = None
    measure: Literal["start", "steps", "never"] = "start"
    objective: Annotated[str, AfterValidator(_objective)] = "throughput"

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if self.corpus and self.store:
            raise UsageError("Both a corpus and a store were given.", "Give one of them.")
        if (self.corpus or self.store) and not any(spec.name == "suffix" for spec in self.specs):
            raise UsageError(
                f"The drafters {self.drafters!r} look in no corpus and in no store.", "Use auto, or name suffix."
            )
        return self

    @property
    def specs(self) -> tuple[DrafterSpec, ...]:
        """The drafters; none for `none`."""
        return parse_drafters(self.drafters)

    @property
    def aim(self) -> Objective:
        return parse_objective(self.objective)


def read_options(environment: Mapping[str, str] = os.environ) -> Options:
    """UsageError, naming the option and where it was written, for one that is unknown or not valid."""
    given: dict[str, tuple[Any, str]] = {}
    if file := environment.get(f"{PREFIX}CONFIG"):
        given = {name: (value, f"{file}: {name}") for name, value in _read_file(Path(file)).items()}
    for name, value in environment.items():
        option = name.removeprefix(PREFIX)
        if option != name and option not in APART and value:
            given[option.lower()] = value, name
    try:
        return Options.model_validate({name: value for name, (value, _) in given.items()})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        value, where = given[name]
        if first["type"] == "extra_forbidden":
            raise UsageError(
                f"{where} is no option.", did_you_mean(name, Options.model_fields, otherwise=_HINT)
            ) from None
        raise UsageError(f"{where} = {shown(str(value))} is not possible: {first['msg']}.", _HINT) from None
    except UsageError as error:
        raise UsageError(f"An option of wager-vllm is not possible: {error.message}", error.hint or _HINT) from None


def _read_file(path: Path) -> dict[str, Any]:
    text = read_text(path.expanduser(), "file of options", _HINT)
    try:
        values = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as options: {error}.", _HINT) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no options by name.", _HINT)
    return values
