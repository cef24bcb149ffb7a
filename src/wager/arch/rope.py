"""Rotary position embedding (RoPE) and its published scalings, each reduced to the factors and magnitude of a Rope.

Scaling parameters have the names of Hugging Face configurations; keys of GGUF metadata are renamed to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wager.arch.config_keys import ConfigKeys, short_repr
from wager.elementary import cosine_and_sine, exp, log
from wager.errors import ModelError

_SMALLEST, _LARGEST = 1e-6, 1e6
"""Limits of the factors and bounds of a scaling: published ones lie between 0.1 and 1000."""
_LARGEST_THETA = 1e15
"""Published bases lie between 10^4 and 10^11."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; any scaling is reduced to `factors` and `magnitude`.

    Pair i of a head is rotated by position * theta^(-2i/d) / factors[i]; no factors means all ones, and an infinite one
    no rotation. `magnitude` multiplies both cosine and sine (YaRN's attention factor, which thereby scales queries and
    keys alike).
    `long_factors` replace the factors where sequences may have more positions than `original` (LongRoPE).
    """

    theta: float
    factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    long_factors: tuple[float, ...] = ()
    original: int = 0

    def table(self, positions: int, rope_dim: int) -> NDArray[np.float32]:
        """cos | sin of every angle, float32 [positions, rope_dim], computed in float64. `positions` are as many as a
        sequence may have: which factors LongRoPE takes does not change while a sequence grows.

        The frequencies are rounded to float32 first, because that is what models are trained with.
        """
        exponents = np.arange(0, rope_dim, 2) / rope_dim
        factors = self.long_factors if self.long_factors and positions > self.original else self.factors
        frequencies = exp(-exponents * log(self.theta)) / np.array(factors or 1.0)
        angles = np.outer(np.arange(positions), frequencies.astype(np.float32).astype(np.float64))
        return (self.magnitude * np.concatenate(cosine_and_sine(angles), axis=1)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Scaling:
    """A model's scaling parameters, its theta, the rotated dimensions of a head and the model's context."""

    keys: ConfigKeys
    theta: float
    head_dim: int
    context: int

    def number(self, name: str, default: float | None = None) -> float:
        return read_scale(self.keys, name, default)

    def factors(self, name: str, pairs: int) -> tuple[float, ...]:
        """The divisors of each pair's frequency."""
        values = self.keys.numbers(name) or []
        if len(values) != pairs or not all(_SMALLEST <= value <= _LARGEST for value in values):
            raise self.keys.wrong(name, f"a list of {pairs} numbers from {_SMALLEST:g} to {_LARGEST:g}")
        return tuple(map(float, values))

    @property
    def original(self) -> float:
        """Context length of the original training, before the extension."""
        return self.keys.integer("original_max_position_embeddings", default=self.context)

    @property
    def wavelengths(self) -> NDArray[np.float64]:
        """Positions per full rotation of each pair, [head_dim / 2]."""
        pairs = np.arange(0, self.head_dim, 2, dtype=np.float64)
        return np.asarray(2 * math.pi * exp(pairs / self.head_dim * log(self.theta)), dtype=np.float64)


def read_rope(keys: ConfigKeys, *, theta: float, head_dim: int, context: int) -> Rope:
    """The rotation that scaling parameters describe (without any keys: none).

    `theta` is the base, `context` the model's own number of positions. ModelError names a scaling that is not known,
    and a parameter that is damaged.
    """
    kind = rope_kind(keys)
    scaling = _SCALINGS.get(kind)
    if scaling is None:
        raise ModelError(
            f"RoPE scaling {short_repr(kind)} is not supported.",
            f"Supported are: {', '.join(_SCALINGS)}. If the model works without it, remove the scaling.",
        )
    return scaling(_Scaling(keys, theta, head_dim, context))


def rope_kind(keys: ConfigKeys) -> str:
    """The name of the scaling that parameters state."""
    return keys.text("rope_type") or keys.text("type") or "default"


def read_scale(keys: ConfigKeys, name: str, default: float | None = None) -> float:
    """A factor or a bound of a scaling, from the key `name`."""
    return keys.number(name, default=default, least=_SMALLEST, most=_LARGEST)


def read_theta(keys: ConfigKeys, name: str, *, default: float = 10000.0) -> float:
    """The base of the frequencies, from the key `name`."""
    theta = keys.number(name, default=default, most=_LARGEST_THETA)
    if theta <= 1:
        raise keys.wrong(name, "above 1")
    return theta


def _default(scaling: _Scaling) -> Rope:
    return Rope(scaling.theta)


def _linear(scaling: _Scaling) -> Rope:
    """Position interpolation (arXiv 2306.15595): every position divided by the factor."""
    return Rope(scaling.theta, (scaling.number("factor"),) * (scaling.head_dim // 2))


def _proportional(scaling: _Scaling) -> Rope:
    """Gemma 4: only the first pairs turn, by frequencies that count all pairs of the head."""
    pairs, factor = scaling.head_dim // 2, scaling.number("factor", 1)
    turned = int(scaling.keys.number("partial_rotary_factor", default=1, most=1) * scaling.head_dim // 2)
    return Rope(scaling.theta, (factor,) * turned + (math.inf,) * (pairs - turned))


def _llama3(scaling: _Scaling) -> Rope:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, interpolated between them."""
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise ModelError(
            f"RoPE scaling 'llama3' has high_freq_factor {high}, which is not above low_freq_factor {low}."
        )
    kept = np.clip((scaling.original / scaling.wavelengths - low) / (high - low), 0, 1)
    return Rope(scaling.theta, tuple((1 / ((1 - kept) / factor + kept)).tolist()))


def _yarn(scaling: _Scaling) -> Rope:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate the pairs with less than beta_slow rotations over the
    original context, keep those with more than beta_fast, ramp between; scale attention by the magnitude."""
    factor = scaling.number("factor", scaling.context / scaling.original)
    pairs = scaling.head_dim // 2

    def pair_of(rotations: float) -> float:
        return float(pairs * log(scaling.original / (rotations * 2 * math.pi)) / log(scaling.theta))

    first = pair_of(scaling.number("beta_fast", 32))
    last = pair_of(scaling.number("beta_slow", 1))
    if scaling.keys.flag("truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, scaling.head_dim - 1)
    interpolated = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
    factors = 1 / (interpolated / factor + 1 - interpolated)
    return Rope(scaling.theta, tuple(factors.tolist()), _yarn_magnitude(scaling, factor))


def _yarn_magnitude(scaling: _Scaling, factor: float) -> float:
    """The attention factor: as configured, or by mscale and mscale_all_dim (DeepSeek), or 0.1 ln(factor) + 1, times
    attn_factor (DeepSeek-R1-0528-Qwen3-8B, as vLLM and GGUF files have it; transformers does not know it)."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else float(0.1 * weight * log(factor) + 1)

    if scaling.keys.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.keys.get("mscale") and scaling.keys.get("mscale_all_dim"):
        return magnitude(scaling.number("mscale")) / magnitude(scaling.number("mscale_all_dim"))
    return magnitude(1) * scaling.number("attn_factor", 1)


def _longrope(scaling: _Scaling) -> Rope:
    """LongRoPE (arXiv 2402.13753): factors of each pair, other ones for contexts beyond the original; the magnitude is
    sqrt(1 + ln(factor) / ln(original))."""
    original, pairs = int(scaling.original), scaling.head_dim // 2
    factor = scaling.number("factor", max(scaling.context / original, 1.0))
    magnitude = math.sqrt(1 + float(log(factor) / log(original))) if factor > 1 else 1.0
    if scaling.keys.get("attention_factor") is not None:
        magnitude = scaling.number("attention_factor")
    short, long = (scaling.factors(f"{name}_factor", pairs) for name in ("short", "long"))
    return Rope(scaling.theta, short, magnitude, long, original)


_SCALINGS: Mapping[str, Callable[[_Scaling], Rope]] = {
    "default": _default,
    "mrope": _default,  # of images' positions; those of texts are plain
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}
