"""The latencies behind published measurements of two drafters: Qwen3.6-35B-A3B in bf16 on a B200.

Source: as in economics/acceptance.py, whose table of tokens per second from 1 to 2048 requests this fits within 4 %,
with all of its best depths (tests/economics/test_simulation.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from wager.economics.latency import StaticLatency
from wager.errors import UsageError

_PEAK, _BANDWIDTH = 2.25e15, 8e12  # FLOP/s in bf16, byte/s
_EXPERTS, _ACTIVE_EXPERTS, _LAYERS = 256, 8, 40
_EXPERT_ELEMENTS = 3_145_728  # weights of one expert in one layer
_ACTIVE_ELEMENTS = 2.92e9  # weights that multiply a row, from the published compute-bound points
_DENSE_SECONDS = 438e-6  # everything dense, read once a step: the published 1394 tok/s at one request
_STATE_BYTES = 33.42e6  # recurrent state of a sequence, read every step
_KV_BYTES = 20_480  # keys and values of one position
_MTP_DENSE, _MTP_ACTIVE = 535_822_336, 564_133_888
_BLOCK_SIZE, _BLOCK_ELEMENTS = 16, 982_515_712

_PUBLISHED_SHAPES = ("mtp", "block:16", "free")


def distinct_with_replacement(count: int, active: int, tokens: float) -> float:
    """Expected distinct experts of `count` when each of `tokens` picks `active` that may coincide, as the source
    counts them: E (1 - (1 - 1/E)^(k t)). The cost model's own count is planner.experts.distinct_experts."""
    missed: float = (1 - 1 / count) ** (active * tokens)
    return count * (1 - missed)


class PublishedLatency(StaticLatency):
    """A LatencyModel: the larger of bytes / bandwidth and FLOPs / peak, one maximum over the pass as in the source.

    `shapes` are those of the drafters by name: `mtp` (one pass per depth), `block:16` (one pass over a block, the same
    at every depth) or `free`.
    """

    def __init__(self, shapes: Mapping[str, str] | None = None) -> None:
        self.shapes = dict(shapes or {"mtp": "mtp", "dflash": "block:16"})
        unknown = [shape for shape in self.shapes.values() if shape not in _PUBLISHED_SHAPES]
        if unknown:
            hint = f"Published are {', '.join(_PUBLISHED_SHAPES)}; another --hardware prices any shape."
            raise UsageError(f"The seconds of the drafter shape {unknown[0]!r} are not published.", hint)

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        """See LatencyModel."""
        if rows <= 0:
            return 0.0
        experts = (distinct_with_replacement(_EXPERTS, _ACTIVE_EXPERTS, rows) + 1) * _LAYERS * _EXPERT_ELEMENTS * 2
        caches = requests * _STATE_BYTES + context_sum * _KV_BYTES
        return max(_DENSE_SECONDS + (experts + caches) / _BANDWIDTH, 2 * _ACTIVE_ELEMENTS * rows / _PEAK)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        """See LatencyModel; UsageError for a drafter without a shape."""
        if drafter not in self.shapes:
            raise UsageError(f"The cost of drafter {drafter!r} is not known.", f"Known are: {', '.join(self.shapes)}.")
        shape = self.shapes[drafter]
        if requests <= 0 or depth <= 0 or shape == "free":
            return 0.0
        if shape == "mtp":
            experts = 1 + distinct_with_replacement(_EXPERTS, _ACTIVE_EXPERTS, requests)
            elements = _MTP_DENSE + experts * _EXPERT_ELEMENTS
            return depth * max(2 * _MTP_ACTIVE * requests / _PEAK, 2 * elements / _BANDWIDTH)
        return max(2 * _BLOCK_ELEMENTS * requests * _BLOCK_SIZE / _PEAK, 2 * _BLOCK_ELEMENTS / _BANDWIDTH)
