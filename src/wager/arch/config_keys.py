"""A model's configuration whose values are checked as they are read: each key has a type and a range; null counts as
absent.

Used for config.json of Hugging Face, the other JSON files of a model, and the metadata of GGUF files.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wager.arch.layers import Gqa
from wager.errors import ModelError

_MOST = 1 << 40
"""No size of a model is larger; a configuration with larger values is damaged."""
_LARGEST = 1e30
"""No other number is larger: what is computed from it must fit into float32."""
_SMALLEST = 1e-30

GGUF_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rotary_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
"""Keys of config.json -> llama.cpp's, without the architecture before them."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 3


def short_repr(value: Any) -> str:
    """A value of a configuration for a message: its repr, shortened, on one line."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a number of {value.bit_length()} bits"


def one_line(error: object) -> str:
    """What another library says about a file, for a message: on one line and not too long."""
    return " ".join(str(error).split())[:300].rstrip(".")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model. ModelError if it is absent, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is absent.", "A model directory needs it; fetch the model again.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The file is damaged; fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "The file is damaged; fetch it again.")
    return value


class ConfigKeys:
    """The values of a configuration. Error messages name it `where` and put `prefix` before the names of its keys;
    `error` is their type. `renamed` are the names of keys that this configuration calls otherwise."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        where: str = "config.json",
        prefix: str = "",
        error: type[ModelError] = ModelError,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self._renamed = renamed or {}
        self.where = where
        self.prefix = prefix
        self.error = error

    def get(self, name: str) -> Any:
        value = self.values.get(self._renamed.get(name, name))
        return self.values.get(name) if value is None else value

    def key(self, name: str) -> str:
        """The whole name of a key in the configuration."""
        return self.prefix + self._renamed.get(name, name)

    def integer(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """A whole number above 0 and at most `most`, from the first of `names` that is present.

        An error if none is present and there is no default, or if the value is something else.
        """
        name = next((key for key in names if self.get(key) is not None), names[0])
        value = self._number(name, default)
        if value != int(value):
            raise self.wrong(name, "a whole number")
        if value > most:
            hint = "The configuration is damaged."
            raise self.error(f"{self._named(name, value)} is larger than any model's.", hint)
        return int(value)

    def count(self, name: str, *, default: int = 0, most: int = _MOST) -> int:
        """A whole number that may be 0; `default` where it is absent."""
        value = self.get(name)
        if value is None:
            return default
        return 0 if value == 0 and not isinstance(value, bool) else self.integer(name, most=most)

    def number(
        self, name: str, *, default: float | None = None, least: float = _SMALLEST, most: float = _LARGEST
    ) -> float:
        """A number above 0, from `least` to `most`. An error if it is absent without a default, or something else."""
        value = self._number(name, default)
        if not least <= value <= most:
            raise self.wrong(name, f"from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: bool | str, *, default: bool = False) -> bool:  # noqa: FBT001
        """A constant, or whether the key of that name is set: true or false, or 1 or 0."""
        if isinstance(name, bool):
            return name
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or value not in (0, 1):
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        """A text, or None if the key is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def section(self, *names: str) -> ConfigKeys:
        """The object under the first of `names` that is present and not empty, as keys of their own; else no keys."""
        name = next((key for key in names if self.get(key) not in (None, {})), names[0])
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return ConfigKeys(value or {}, where=self.where, prefix=f"{self.prefix}{name}.", error=self.error)

    def integers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None if the key is absent."""
        return self._listed(name, int, "a list of whole numbers")

    def numbers(self, name: str) -> list[float] | None:
        """A list of finite numbers, or None if the key is absent."""
        values = self._listed(name, (int, float), "a list of numbers")
        if values is not None and not all(map(math.isfinite, values)):
            raise self.wrong(name, "a list of finite numbers")
        return values

    def texts(self, name: str) -> list[str] | None:
        """A list of texts, or None if the key is absent."""
        return self._listed(name, str, "a list of texts")

    def token_ids(self, name: str, *, vocab: int) -> tuple[int, ...]:
        """An id of a vocabulary of that size, or a list of them; none if the key is absent."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            raise self.wrong(name, f"a token id of the vocabulary, from 0 to {vocab - 1}, or a list of such ids")
        return tuple(ids)

    def per_layer(self, name: str, layers: int, *, known: Sequence[str] = ()) -> Sequence[str] | None:
        """One word for each layer, or None if the key is absent. Entries beyond the layers (of draft modules) are
        left out. An error names a word that is not one of `known` (empty: any)."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers:
            cause = f"has {len(value)} entries" if isinstance(value, list) else f"is {short_repr(value)}"
            raise self.error(f"{self.key(name)} in {self.where} {cause}; it must list each of the {layers} layers.")
        if not all(isinstance(entry, str | int) for entry in value):
            raise self.wrong(name, "a list of words")
        words = [str(entry) for entry in value[:layers]]
        unknown = sorted(set(words) - set(known)) if known else []
        if unknown:
            raise self.error(
                f"{self.key(name)} in {self.where} has {short_repr(unknown[0])}, which is not supported for this "
                "architecture.",
                f"Supported are: {', '.join(known)}.",
            )
        return words

    def refuse(self, name: str, *, unless: tuple[Any, ...]) -> None:
        """An error if the key is present with a value that is not one of `unless`."""
        value = self.get(name)
        if value is not None and value not in unless:
            allowed = ", ".join(map(str, unless))
            raise self.error(
                f"{self._named(name, value)} is not supported for this architecture.", f"Supported is: {allowed}."
            )

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error for a key whose value is not what is expected."""
        return self.error(
            f"{self._named(name, self.get(name))} must be {expected}.", "The file is damaged, or was edited by hand."
        )

    def _number(self, name: str, default: float | None) -> int | float:
        """A finite number above 0."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(
                f"{self.where} lacks {self.key(name)!r}.", "The model's configuration is damaged or incomplete."
            )
        if isinstance(value, list):
            raise self.error(
                f"{self._named(name, value)} differs from layer to layer, which is not supported.",
                "Supported are models whose layers have one shape.",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0")
        return value

    def _listed(self, name: str, kind: type | tuple[type, ...], expected: str) -> list[Any] | None:
        value: list[Any] | None = self.get(name)
        if value is None:
            return None
        types = set(map(type, value)) if isinstance(value, list) else {object}  # far fewer than the entries
        if not all(issubclass(entry, kind) for entry in types) or (kind is not str and bool in types):
            raise self.wrong(name, expected)
        return value

    def _named(self, name: str, value: Any) -> str:
        return f"{self.key(name)} = {short_repr(value)} in {self.where}"


# ---- sizes that every configuration has, within plausible limits ----------------------------------------------------

_MOST_LAYERS, _MOST_HEAD_DIM = 10_000, 8192
MOST_NORM_EPS, MOST_WINDOW = 1.0, (1 << 31) - 1
"""A configuration with larger values is damaged; accepting it would exhaust the memory."""


def read_num_layers(keys: ConfigKeys) -> int:
    """The number of layers."""
    layers = keys.integer("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ModelError(
            f"{keys.key('num_hidden_layers')} = {layers} cannot be right: no model has that number of layers, as"
            f" {keys.where} has.",
            "The configuration is damaged.",
        )
    return layers


def read_head_dim(keys: ConfigKeys, *, heads: int) -> int:
    """The size of a head; where it is not given, the hidden size by the number of heads, rounded down as transformers
    does."""
    if keys.get("head_dim") is not None:
        return keys.integer("head_dim")
    size = keys.integer("hidden_size")
    if size < heads:
        raise ModelError(f"{keys.key('hidden_size')} = {size} in {keys.where} is too small for {heads} heads.")
    return size // heads


def check_head_dim(keys: ConfigKeys, name: str, size: int) -> None:
    """ModelError unless the size of a head is even and plausible."""
    if size > _MOST_HEAD_DIM:
        raise ModelError(f"A {name} of {size} in {keys.where} cannot be right.", "The configuration is damaged.")
    if size % 2:
        raise ModelError(f"{name} = {size} in {keys.where} is odd; rotation needs pairs.")


def check_grouped_query(keys: ConfigKeys, attention: Gqa) -> Gqa:
    """The attention that was read from the keys, or ModelError unless query heads divide evenly among key-value heads
    and head_dim is even and plausible."""
    if attention.heads % attention.kv_heads:
        raise ModelError(
            f"{attention.heads} query heads cannot share {attention.kv_heads} key-value heads evenly, in {keys.where}."
        )
    check_head_dim(keys, "head_dim", attention.head_dim)
    if attention.rope_dim % 2 or not 0 < attention.rope_dim <= attention.head_dim:
        raise ModelError(
            f"{attention.rope_dim} rotated dimensions in heads of {attention.head_dim}, in {keys.where}, are no pairs.",
            "The configuration is damaged.",
        )
    return attention
