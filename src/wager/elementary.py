"""log, exp, sine and cosine in float64 by additions, products and quotients alone, each rounded as IEEE 754 says: the
same bits on every machine and with every numpy. (numpy takes those of the C library, or its own for some processors;
they differ in the last place.) All to one or two units in the last place. What decides a token or a weight is computed
with these; see docs/arithmetic.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Doubles = NDArray[np.float64]

_LOG2_UPPER, _LOG2_LOWER = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
"""log(2) in two parts, the first with so few bits that its product with an exponent is exact."""
_ROOT_HALF = 0x3FE6A09E667F3BCD
"""The bits of sqrt(1/2)."""
_HALF_PI = tuple(map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")))
"""pi / 2 in parts: products of the first two with whole numbers below 2^20 are exact."""
_SMALLEST_POWER, _LARGEST_POWER = -800.0, 800.0


def _polynomial(z: _Doubles, coefficients: list[float]) -> _Doubles:
    """Horner's rule, the highest power first."""
    total = np.full_like(z, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= z
        total += coefficient
    return total


def _inverse_factorials(last: int, step: int, first: int) -> list[float]:
    """1/last! .. 1/first!, every `step`-th; signs alternate if the step is 2, so that the last is positive."""
    found, factorial = [], 1.0
    for i in range(1, last + 1):
        factorial *= i
        if i >= first and (i - first) % step == 0:
            sign = -1.0 if step == 2 and (i - first) // 2 % 2 else 1.0
            found.append(sign / factorial)
    return found[::-1]


_ARTANH = [2.0 / odd for odd in range(25, 2, -2)]
_EXP = [*_inverse_factorials(14, 1, 1), 1.0]
_SINE = _inverse_factorials(19, 2, 3)
_COSINE = _inverse_factorials(20, 2, 4)


def log(x: ArrayLike) -> _Doubles:
    """Of positive normal numbers. csrc/noise.h has the same operations."""
    bits = np.array(x, dtype=np.float64, ndmin=1).view(np.int64)
    k = (bits - _ROOT_HALF) >> 52
    bits -= k << 52
    f = bits.view(np.float64)
    f -= 1.0
    s = f / (2.0 + f)
    z = s * s
    half = 0.5 * f * f
    exponent = k.astype(np.float64)
    r = _polynomial(z, _ARTANH)
    found = exponent * _LOG2_UPPER - ((half - (s * (half + r * z) + exponent * _LOG2_LOWER)) - f)
    return found.reshape(np.shape(x))


def exp(x: ArrayLike) -> _Doubles:
    """Zero where the result is below 2^-1074; infinity above the largest number."""
    values = np.clip(np.asarray(x, dtype=np.float64), _SMALLEST_POWER, _LARGEST_POWER)
    k = np.rint(values / (_LOG2_UPPER + _LOG2_LOWER))
    remainder = (values - k * _LOG2_UPPER) - k * _LOG2_LOWER
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(np.ldexp(_polynomial(remainder, _EXP), k.astype(np.int32)), dtype=np.float64)


def cosine_and_sine(x: ArrayLike) -> tuple[_Doubles, _Doubles]:
    """Of angles from 0 to 10^6 in radians."""
    values = np.asarray(x, dtype=np.float64)
    k = np.rint(values / _HALF_PI[0])
    remainder = values
    for part in _HALF_PI:
        remainder = remainder - k * part
    z = remainder * remainder
    sine = remainder - remainder * z * _polynomial(z, _SINE)
    cosine = 1.0 - (0.5 * z - z * z * _polynomial(z, _COSINE))
    quarter = k.astype(np.int64) & 3
    odd = (quarter & 1).astype(bool)
    found_cosine, found_sine = np.where(odd, sine, cosine), np.where(odd, cosine, sine)
    return (
        np.where((quarter == 1) | (quarter == 2), -found_cosine, found_cosine),
        np.where(quarter >= 2, -found_sine, found_sine),
    )
