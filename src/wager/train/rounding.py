"""How a head's matrices are rounded to 4 or 8 bits, and training with them rounded.

Groups of 32 inputs have a float16 scale and a whole zero point each. The range of a group is that of its weights,
narrowed as far as this lowers the sum of squared errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
_NARROWED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range that are tried."""


def fits_groups(shape: Sequence[int]) -> bool:
    """Whether it is the shape of a matrix that can be rounded."""
    return len(shape) == 2 and shape[0] % 8 == 0 and shape[1] % GROUP == 0


def _grouped(matrix: Tensor) -> Tensor:
    return matrix.view(len(matrix), -1, GROUP)


class RoundedMatrix(NamedTuple):
    """`codes` uint8 [n, k], `scales` float16 and `zeros` uint8 [n, k / 32]: a weight is scale * (code - zero)."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    @property
    def weights(self) -> Tensor:
        """float32 [n, k]."""
        groups = _grouped(self.codes).float() - self.zeros.float()[..., None]
        return (groups * self.scales.float()[..., None]).flatten(-2)


def rounded(matrix: Tensor, bits: int) -> RoundedMatrix:
    """A matrix [n, k] in 4 or 8 bits. In 8 bits all zero points are in the middle."""
    levels, groups = (1 << bits) - 1, _grouped(matrix.float())
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if bits == 8:
        high = torch.maximum(high, -low)
        low = -high * (128 / 127)
    least = torch.full_like(low, float("inf"))
    codes, scales, zeros = torch.zeros_like(groups), torch.ones_like(low), torch.zeros_like(low)
    for share in _NARROWED:
        step = ((high - low) * (share / levels)).clamp(min=2.0**-14).half().float()
        zero = (-low * share / step).round().clamp(0, levels) if bits == 4 else torch.full_like(low, 128)
        code = ((groups / step[..., None]).round() + zero[..., None]).clamp(0, levels)
        error = ((code - zero[..., None]) * step[..., None] - groups).square().sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        codes = torch.where(better[..., None], code, codes)
        scales, zeros = torch.where(better, step, scales), torch.where(better, zero, zeros)
    return RoundedMatrix(codes.flatten(-2).to(torch.uint8), scales.half(), zeros.to(torch.uint8))


@contextmanager
def as_rounded(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Within it matrices have their values in 4 bits. Gradients are taken there and belong to the whole values, which
    return (straight-through estimation, arXiv 1308.3432)."""
    kept = [(parameter, parameter.data) for parameter in parameters if fits_groups(parameter.shape)]
    if kept:
        groups = torch.cat([values.view(-1, GROUP) for _, values in kept])  # few kernels instead of many
        found = torch.split(rounded(groups, 4).weights, [v.numel() // GROUP for _, v in kept])
        for (parameter, values), part in zip(kept, found, strict=True):
            parameter.data = part.view(values.shape)
    try:
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values
