"""The sampling parameters of a request, with their ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from wager.errors import UsageError
from wager.grammar import Grammar
from wager.token_ids import as_integer, as_token_ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GREEDY_TEMPERATURE = 1e-4
"""Temperatures at or below this are greedy by definition (verification rules, section 1.6)."""

_RANGES: Mapping[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, 2**63 - 1),
    "temperature": (float, 0, 100),
    "top_k": (int, 0, 2**63 - 1),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-3, 1e3),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "seed": (int, 0, 2**64 - 1),
    "logprobs": (int, 0, 20),
    "n": (int, 1, 64),
}
"""Type, minimum and maximum of each number: within these ranges no logits processor overflows, for any logits."""


def _require(name: str, value: object, rule: str, *, ok: bool) -> None:
    if not ok:
        raise UsageError(f"{name} = {value!r} ({type(value).__name__}) is not possible.", f"{name} must be {rule}.")


def _require_number(name: str, value: object, kind: type, low: float, high: float) -> None:
    # a bool is not a number here, an int is a float, and NaN is in no range
    is_kind = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    noun = "an integer" if kind is int else "a number"
    _require(name, value, f"{noun} between {low} and {high}", ok=is_kind and low <= value <= high)  # type: ignore[operator]


class TokenBiases(dict[int, float]):
    """What is added to the logits of some token ids; it must not be changed."""

    @cached_property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids, and what is added to the logit of each; made once, since every row of every step asks for them."""
        import numpy as np  # which the commands that need no model do without

        size = len(self)
        return np.fromiter(self.keys(), np.int64, size), np.fromiter(self.values(), np.float64, size)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Defaults are greedy decoding of 256 tokens.

    `top_k` 0 and `top_p` 1.0 are off. `stop` is one string or several. `logit_bias` maps a token id to a value in
    [-100, 100] added to its logit. `logprobs` is the number of most likely alternatives reported per token (None:
    none), `n` the number of choices; `repetition_penalty` counts tokens of prompt and output, `presence_penalty` and
    `frequency_penalty` of the output. `prediction` is what the output is expected to be like, a text or token ids:
    drafters guess from it, and it changes no token. `grammar` is what the output must be like: only tokens that it
    allows are sampled, and the output ends when it is complete.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    prediction: str | Sequence[int] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, limits in _RANGES.items():
            if name not in ("seed", "logprobs") or getattr(self, name) is not None:
                _require_number(name, getattr(self, name), *limits)
        _require("top_p", self.top_p, "above 0", ok=self.top_p > 0)
        _require("ignore_eos", self.ignore_eos, "True or False", ok=isinstance(self.ignore_eos, bool))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _token_biases(self.logit_bias))
        object.__setattr__(self, "prediction", _prediction(self.prediction))
        _check_grammar(self)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def biases(self) -> TokenBiases:
        """`logit_bias` as it was checked."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def filters(self) -> tuple[int, float, float]:
        """top_k, top_p and min_p."""
        return self.top_k, float(self.top_p), float(self.min_p)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs_history(self) -> bool:
        """The same of the whole distribution, which a grammar makes depend on them too."""
        return self.grammar is not None or self.penalises

    @property
    def filters_only(self) -> bool:
        """Whether nothing but temperature and filters makes the distribution another one than that of the logits."""
        return self.grammar is None and not self.penalises and not self.logit_bias

    @property
    def plain(self) -> bool:
        """Whether only the temperature changes the logits: the token is argmax(z / T + g) over all token ids."""
        return self.grammar is None and self.temperature_only

    @property
    def temperature_only(self) -> bool:
        """The same over the token ids that the grammar allows, if there is one."""
        unfiltered = self.greedy or (self.top_k == 0 and self.top_p == 1 and self.min_p == 0)
        return unfiltered and not self.penalises and not self.logit_bias


def chosen_params(params: object, default: SamplingParams) -> SamplingParams:
    """`params`, or where there are none the default. UsageError for what is none."""
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(
            f"params of type {type(params).__name__} are not possible.", "Give one SamplingParams for all prompts."
        )
    return params or default


def _stop_strings(value: object) -> tuple[str, ...]:
    """One string is one stop sequence, as in OpenAI's API."""
    strings = (value,) if isinstance(value, str) else value
    valid = isinstance(strings, tuple | list) and all(type(each) is str and each for each in strings)
    _require("stop", value, "a tuple of strings that are not empty", ok=valid)
    return tuple(strings)  # type: ignore[arg-type]


def _stop_token_ids(value: object) -> tuple[int, ...]:
    try:
        return as_token_ids(value)
    except TypeError as error:
        raise UsageError(
            f"stop_token_ids is not possible: {error}.", "stop_token_ids must be a tuple of integers."
        ) from None


def _check_grammar(params: SamplingParams) -> None:
    _require("grammar", params.grammar, "a Grammar", ok=params.grammar is None or isinstance(params.grammar, Grammar))
    if params.grammar is not None and params.ignore_eos:
        raise UsageError("ignore_eos and grammar exclude each other.", "A grammar says where the output ends.")


def _prediction(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    try:
        return as_token_ids(value)
    except TypeError as error:
        raise UsageError(
            f"prediction is not possible: {error}.", "prediction must be a text or a sequence of token ids."
        ) from None


def _token_biases(value: object) -> TokenBiases:
    """Keys become Python ints."""
    _require("logit_bias", value, "a mapping of ids to addends", ok=isinstance(value, Mapping))
    biases = TokenBiases()
    for key, bias in value.items():  # type: ignore[attr-defined]
        try:
            token = as_integer(key)
        except TypeError as error:
            raise UsageError(
                f"logit_bias has the key {error}.", "logit_bias must be keyed by integer token ids."
            ) from None
        _require_number(f"logit_bias[{token}]", bias, float, -100, 100)
        biases[token] = bias
    return biases
