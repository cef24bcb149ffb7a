"""The configuration of an engine: groups of frozen values, parsed and checked when they are constructed.

Options have flat names wherever people write them (keywords of `LLM`, flags, a TOML file); `EngineConfig.from_options`
sorts them into their groups. `loading.load` turns a configuration into an engine.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from wager.drafter_spec import DrafterSpec, check_draft_threads, parse_drafters
from wager.economics.options import DEEPEST, Objective, PolicySpec, parse_objective, parse_policy
from wager.errors import UsageError
from wager.inputs import check_threads, did_you_mean, read_text, shown, whole_number
from wager.types import RULES, KVDtype, SamplingParams, VerifyRule, require

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

DTYPES = ("auto", "bf16", "q8", "q4")

LARGEST_MEMORY = 1 << 60
"""Bytes, 2^30 GiB; more is a slip of the keyboard."""

MOST_POSITIONS, MOST_ROWS = (1 << 31) - 1, 1 << 16
"""Positions of a cache or a sequence, and rows or sequences of a pass, that may be requested."""

_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, the number formats and the threads.

    model: directory, GGUF file, known name, ORG/NAME on the hub, or `random:FAMILY:SIZE`. dtype: auto (a GGUF
    file in its own types, other models in bfloat16), bf16 or bfloat16, q8 or q4; see models/weights.py. kv_dtype: of
    cached keys and values, bf16, or q8: int8 with a scale per position and head, half the memory. threads: of the
    kernels, None for one per physical core. chat_template: a file with a Jinja template in place of the model's own.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    kv_dtype: KVDtype = "bf16"
    threads: int | None = None
    chat_template: str | Path | None = None

    def __post_init__(self) -> None:
        _check_text("model", self.model)
        object.__setattr__(self, "chat_template", None if self.chat_template is None else str(self.chat_template))
        _check_text("chat_template", self.chat_template, optional=True)
        if self.dtype == "bfloat16":
            object.__setattr__(self, "dtype", "bf16")
        _check_choice("dtype", self.dtype, (*DTYPES, "bfloat16"))
        _check_choice("kv_dtype", self.kv_dtype, get_args(KVDtype))
        _check_integer("threads", self.threads, minimum=1)
        if self.threads is not None:
            check_threads(self.threads)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are drafted and which draft tokens are accepted.

    drafter: `none`, `auto` or NAME[:ARG],... of the registry. policy: `adaptive`, `threshold[:P]` or `fixed` (None:
    adaptive, or fixed if a depth is given). depth: draft tokens per step and sequence; under the adaptive policy the
    maximum (None: the drafter's default; 0: none). objective: the goal of the adaptive policy, `throughput`, `latency`
    or `slo:TIME` per token, such as slo:20ms. verify: the acceptance rule. draft_threads: threads of drafters that run
    a model, which then draft while the target verifies (0: they take turns).

    `drafters`, `parsed_policy` and `parsed_objective` are the parsed values of those texts. Raises UsageError for a
    text that cannot be parsed and for options that contradict each other.
    """

    drafter: str = "auto"
    policy: str | None = None
    depth: int | None = None
    objective: str = "throughput"
    verify: VerifyRule = "match"
    draft_threads: int = 0
    drafters: tuple[DrafterSpec, ...] = field(init=False, repr=False, compare=False)
    parsed_policy: PolicySpec = field(init=False, repr=False, compare=False)
    parsed_objective: Objective = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_text("drafter", self.drafter)
        _check_text("policy", self.policy, optional=True)
        _check_text("objective", self.objective)
        _check_choice("verify", self.verify, get_args(VerifyRule))
        _check_integer("depth", self.depth, minimum=0, maximum=DEEPEST)
        default = "adaptive" if self.depth is None else "fixed"
        object.__setattr__(self, "drafters", parse_drafters(self.drafter))
        object.__setattr__(self, "parsed_policy", parse_policy(default if self.policy is None else self.policy))
        object.__setattr__(self, "parsed_objective", parse_objective(self.objective))
        for spec in self.drafters:
            if spec.makes_trees:
                check_rule_for_trees(str(spec), self.verify)
        _check_integer("draft_threads", self.draft_threads, minimum=0, optional=False)
        check_draft_threads(self.drafters, self.draft_threads, rule=self.verify)
        if self.drafters and self.depth != 0:
            self.check_policy(len(self.drafters))

    def check_policy(self, drafter_count: int) -> None:
        """Refuse options that the policy would ignore: an objective or drafters that it does not use."""
        kind = self.parsed_policy.kind
        if kind == "adaptive":
            return
        if self.parsed_objective.kind != "throughput":
            raise UsageError(
                f"objective = {self.objective!r} has no effect under policy {kind!r}: only the adaptive one uses it.",
                "Leave it out, or use --policy adaptive.",
            )
        if drafter_count > 1:
            raise UsageError(
                f"Policy {kind!r} uses one drafter, but there are {drafter_count}: {self.drafter}.",
                "Name one drafter, or use --policy adaptive.",
            )


@dataclass(frozen=True, slots=True)
class CapacityConfig:
    """Memory, and the size of a pass.

    memory: bytes that weights, cache, workspace and drafters may take (None: most of the free memory). cache_tokens:
    positions the cache holds (None: planned from memory). prefix_cache: reuse the cache of equal prefixes.
    max_rows: rows of one pass. max_prefill_rows: rows of prompts in a pass in which other sequences decode (None: as
    many as take 0.02 s): with more an answer begins sooner, with fewer others flow evenly meanwhile.
    max_sequences: sequences that run at once, each with a row or more (None: 64, fewer where their recurrent states
    would take much of the memory). max_context: positions per sequence (None: the model's own limit).
    """

    memory: int | None = None
    cache_tokens: int | None = None
    prefix_cache: bool = True
    max_rows: int = 512
    max_prefill_rows: int | None = None
    max_sequences: int | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        _check_integer("memory", self.memory, minimum=1, maximum=LARGEST_MEMORY)
        _check_integer("cache_tokens", self.cache_tokens, minimum=1, maximum=MOST_POSITIONS)
        _check_integer("max_rows", self.max_rows, minimum=1, maximum=MOST_ROWS, optional=False)
        _check_integer("max_prefill_rows", self.max_prefill_rows, minimum=1, maximum=MOST_ROWS)
        _check_integer("max_sequences", self.max_sequences, minimum=1, maximum=MOST_ROWS)
        if self.max_sequences is not None and self.max_sequences > self.max_rows:
            raise UsageError(
                f"max_sequences = {self.max_sequences} is more than max_rows = {self.max_rows}, the rows of a pass.",
                f"Give at most {self.max_rows}, or more max_rows.",
            )
        _check_integer("max_context", self.max_context, minimum=2, maximum=MOST_POSITIONS)
        require("prefix_cache", self.prefix_cache, "True or False", ok=isinstance(self.prefix_cache, bool))


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """What is kept of requests on disk, for the guesses of later ones (docs/privacy.md).

    learn: folder; None keeps nothing. learn_prompts: prompts are kept too, not answers alone. learn_days: of how many
    days. learn_bytes: how many bytes for each tenant.
    """

    learn: str | Path | None = None
    learn_prompts: bool = False
    learn_days: float = 30.0
    learn_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "learn", self.learn if self.learn is None else str(self.learn))
        _check_text("learn", self.learn, optional=True)
        require("learn_prompts", self.learn_prompts, "True or False", ok=isinstance(self.learn_prompts, bool))
        days = self.learn_days
        is_number = isinstance(days, int | float) and not isinstance(days, bool)
        require("learn_days", days, "a number above 0, at most 36500", ok=is_number and 0 < days <= 36500)
        _check_integer("learn_bytes", self.learn_bytes, minimum=1 << 20, maximum=LARGEST_MEMORY, optional=False)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of an engine, and the sampling parameters of requests that have none of their own."""

    model: ModelConfig = field(default_factory=ModelConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    learning: LearningConfig = field(default_factory=LearningConfig)
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """From options by their flat names: `from_options(model=..., drafter="ngram", depth=3, temperature=0.7)`.

        Raises UsageError that names an option which is unknown (and the nearest known one), of the wrong type, out of
        range or in conflict with another.
        """
        return cls.from_mapping(options)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str = "") -> EngineConfig:
        """As `from_options`; `source`, such as a file's name, begins the message of every error."""
        try:
            for name in values:
                if name not in OPTIONS:
                    raise _unknown("Option", name, list(OPTIONS))
            options = dict(values)
            for name in ("memory", "learn_bytes"):
                if isinstance(options.get(name), str):
                    options[name] = parse_size(options[name], name)
            groups = {
                group: kind(**{name: value for name, value in options.items() if OPTIONS[name] == group})
                for group, kind in _GROUPS.items()
            }
        except UsageError as error:
            if not source:
                raise
            raise UsageError(f"{source}: {error.message}", error.hint) from error
        return cls(**groups)

    def as_options(self) -> dict[str, Any]:
        """Every option by its flat name; `from_options(**config.as_options())` is an equal configuration."""
        return {name: getattr(getattr(self, group), name) for name, group in OPTIONS.items()}

    def with_options(self, **options: Any) -> EngineConfig:
        """This configuration with some options changed, by their flat names; checked anew."""
        return self.from_mapping({**self.as_options(), **options})


_GROUPS: Mapping[str, type] = {
    "model": ModelConfig,
    "speculation": SpeculationConfig,
    "capacity": CapacityConfig,
    "learning": LearningConfig,
    "sampling": SamplingParams,
}

OPTIONS: Mapping[str, str] = {
    field.name: group for group, kind in _GROUPS.items() for field in fields(kind) if field.init
}
"""Every option by its flat name -> the group it belongs to."""


def read_options(path: Path) -> dict[str, Any]:
    """Options by their flat names from a TOML file, such as `drafter = "ngram"` or `max-tokens = 64`.

    Names may be written as flags are, with hyphens. Raises UsageError that names the file and the offending key.
    """
    text = read_text(path, "configuration file", "Give a TOML file.")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, as that of absurdly long numbers
        raise UsageError(f"{path} is not TOML: {error}.", 'A line is an option, such as drafter = "ngram".') from error
    options = {name.replace("-", "_"): value for name, value in values.items()}
    if twice := [name for name in options if {name, name.replace("_", "-")} <= values.keys() and "_" in name]:
        raise UsageError(f"{path} has {twice[0]!r} twice.", "Write it once, with _ or with -.")
    if isinstance(bias := options.get("logit_bias"), dict):  # whose keys are texts in TOML
        named = {token: whole_number(token) for token in bias}
        options["logit_bias"] = {token if named[token] is None else named[token]: bias[token] for token in bias}
    EngineConfig.from_mapping(options, source=str(path))
    return options


def parse_size(text: str, name: str = "memory") -> int:
    """Bytes of 4GiB, 512MiB, 4G or plain bytes; all units are powers of 1024. UsageError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match or not float(match[1]):
        raise UsageError(f"{name} = {shown(text)} is not an amount of memory.", "Write 4GiB or 512MiB.")
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if not 1 <= size <= LARGEST_MEMORY:
        raise UsageError(f"{name} = {shown(text)} is out of range.", f"Give 1 byte to {LARGEST_MEMORY >> 40} TiB.")
    return int(size)


def check_rule_for_trees(drafter: str, rule: VerifyRule) -> None:
    """Refuse a drafter that makes trees under a rule that verifies chains only."""
    if not RULES[rule].verifies_trees:
        alternatives = " or ".join(name for name, properties in RULES.items() if properties.verifies_trees)
        raise UsageError(
            f"The {rule} rule verifies chains, and drafter {drafter!r} makes trees.", f"Use --verify {alternatives}."
        )


def _check_text(name: str, value: object, *, optional: bool = False) -> None:
    is_text = isinstance(value, str) and value != ""
    require(name, value, "a text that is not empty", ok=is_text or (optional and value is None))


def _check_integer(
    name: str, value: object, *, minimum: int, maximum: int | None = None, optional: bool = True
) -> None:
    if value is None and optional:
        return
    is_enough = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    require(name, value, f"an integer, at least {minimum}", ok=is_enough)
    require(name, value, f"an integer, at most {maximum}", ok=maximum is None or value <= maximum)  # type: ignore[operator]


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise _unknown(f"{name} =", value, allowed)


def _unknown(subject: str, value: object, known: Sequence[str]) -> UsageError:
    return UsageError(f"{subject} {value!r} is not known.", did_you_mean(str(value), known))
