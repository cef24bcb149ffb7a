"""Published measurements that serve as priors, as synthetic worlds and as fixtures: survival by depth, a price surface.

Source: F. Finn, "Adaptive speculative decoding: picking draft lengths at runtime" (June 2026): Qwen3.6-35B-A3B in
bf16 on a B200, temperature 0.6, SPEED-Bench qualitative, over half a million rounds a drafter. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from wager.economics.latency_model import StaticLatency

MTP_SURVIVAL = (0.779, 0.583, 0.444, 0.349, 0.279, 0.226, 0.185, 0.155)
"""Chance that depths 1 to 8 of a multi-token-prediction head are reached and right."""

DFLASH_SURVIVAL = (
    0.772, 0.565, 0.420, 0.323, 0.256, 0.208, 0.170, 0.141, 0.120, 0.103, 0.089, 0.078, 0.068, 0.059, 0.051,
)  # fmt: skip
"""The same for a block-diffusion drafter, depths 1 to 15."""

CURVES = {"mtp": MTP_SURVIVAL, "dflash": DFLASH_SURVIVAL}


def conditional(survival: Sequence[float]) -> tuple[float, ...]:
    """Chance of each depth given that the one above was right: S_k / S_(k-1)."""
    return tuple(here / above for here, above in zip(survival, (1.0, *survival[:-1]), strict=True))


_PEAK, _BANDWIDTH = 2.25e15, 8e12  # FLOP/s in bf16, byte/s
_EXPERTS, _ROUTED, _LAYERS = 256, 8, 40
_EXPERT = 3_145_728  # weights of one expert in one layer
_ACTIVE = 2.92e9  # weights that multiply a row, from the published compute-bound points
_DENSE_SECONDS = 438e-6  # everything dense, read once a step: the published 1394 tok/s at one request
_STATE_BYTES = 33.42e6  # recurrent state of a sequence, read every step
_KV_BYTES = 20_480  # keys and values of one position
_MTP_DENSE, _MTP_ACTIVE, _MTP_EXPERT = 535_822_336, 564_133_888, 3_145_728
_BLOCK, _BLOCK_WEIGHTS = 16, 982_515_712


def _experts_hit(tokens: float) -> float:
    """Distinct experts of `tokens`, drawn with replacement as the source does."""
    missed: float = (1 - 1 / _EXPERTS) ** (_ROUTED * tokens)
    return _EXPERTS * (1 - missed)


class EnvelopeSurface(StaticLatency):
    """The step and drafter prices behind the published envelopes: the larger of bytes / bandwidth and FLOPs / peak.

    One maximum over the whole step, as in the source. Fits its table of tokens per second from 1 to 2048 requests
    within 4 % and all its best depths (tests/economics). Drafters: `mtp` (one pass a depth) and `dflash` (one block,
    flat in depth); any other name is free. A StepSurface.
    """

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """See StepSurface."""
        if rows <= 0:
            return 0.0
        experts = (_experts_hit(rows) + 1) * _LAYERS * _EXPERT * 2
        own = requests * _STATE_BYTES + context_sum * _KV_BYTES
        return max(_DENSE_SECONDS + (experts + own) / _BANDWIDTH, 2 * _ACTIVE * rows / _PEAK)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See StepSurface."""
        if requests <= 0 or depth <= 0:
            return 0.0
        if drafter == "mtp":
            resident = _MTP_DENSE + (1 + _experts_hit(requests)) * _MTP_EXPERT
            return depth * max(2 * _MTP_ACTIVE * requests / _PEAK, 2 * resident / _BANDWIDTH)
        if drafter == "dflash":
            return max(2 * _BLOCK_WEIGHTS * requests * _BLOCK / _PEAK, 2 * _BLOCK_WEIGHTS / _BANDWIDTH)
        return 0.0
