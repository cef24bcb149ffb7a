"""Models, a device and step times behind published figures, which the cost model and the policy are compared with.

The charts are of a simplified DeepSeek-V4-Flash on a B200: 107e6 projection weights, experts of 25.2e6 weights, no
head, no router, and either one attention for all 43 layers or the real mix of layers. Source: "The economics of
speculative decoding", fergusfinn.com, June 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wager.arch import Attention, Compressed, Experts, Indexer, Layer, ModelSpec, Precision, Quoted, Stream
from wager.economics.latency import LatencyModel
from wager.planner.devices import Device

_PROJECTIONS = 107_000_000


class _Unrouted(Experts):
    """Experts whose router is left out of all figures."""

    def router(self, hidden: int) -> int:
        del hidden
        return 0


_EXPERTS = _Unrouted(256, 6, 1, 2000)  # times a hidden size of 4200: 25.2e6 weights each


@dataclass(frozen=True, slots=True)
class _RoundedProjections:
    """An attention kind with the charts' rounded number of projection weights."""

    kind: Attention

    def weights(self, hidden: int) -> int:
        del hidden
        return _PROJECTIONS

    def kv_bytes(self, context: float, precision: Precision) -> float:
        return self.kind.kv_bytes(context, precision)

    def streams(self, context: float, rows: float, precision: Precision) -> tuple[Stream, ...]:
        return self.kind.streams(context, rows, precision)


def _model(name: str, layers: tuple[Layer, ...]) -> ModelSpec:
    precision = Precision.of("fp8", "fp4", cache="fp8")
    return ModelSpec(
        name,
        4200,
        129280,
        False,
        layers,
        precision,
        1048576,
        head=False,
        source="constants of the published charts",
    )


def _real_layers() -> tuple[Layer, ...]:
    """2 layers with the window alone, 21 with CSA, 20 with HCA."""
    near = Compressed(64, 512, 64, 1024, 8, 1024, window=128)
    kinds = near, replace(near, ratio=4, indexer=Indexer(64, 128, 512)), replace(near, ratio=128)
    return tuple(
        Layer(_RoundedProjections(kind), _EXPERTS, count) for kind, count in zip(kinds, (2, 21, 20), strict=True)
    )


FLAT_ATTENTION = _model("DeepSeek-V4-Flash-charts", (Layer(Quoted(_PROJECTIONS, 2 * 69632, 576), _EXPERTS, 43),))
"""Every layer attends to every position at 2 x 69,632 FLOPs per pair and 576 bytes per position."""

REAL_LAYERS = _model("DeepSeek-V4-Flash-mix", _real_layers())
"""The same with the real kinds of layers."""

B200_CHARTS = Device(
    "B200-charts",
    {"bf16": 281 * 8e12, "fp8": 563 * 8e12, "fp4": 1125 * 8e12},
    8e12,
    192e9,
    900e9,
    50e9,
    8,
    label="the ridges of the published charts",
)
"""With the rounded ridges of the charts."""

# ---- step times ------------------------------------------------------------------------------------------------------

_PEAK, _BANDWIDTH = 2.25e15, 8e12  # FLOP/s in bf16, byte/s
_COUNT, _ACTIVE_EXPERTS, _LAYERS = 256, 8, 40
_EXPERT_ELEMENTS = 3_145_728  # weights of one expert in one layer
_ACTIVE_ELEMENTS = 2.92e9  # weights that multiply a row, from the published compute-bound points
_DENSE_SECONDS = 438e-6  # everything dense, read once a step: the published 1394 tok/s at one request
_STATE_BYTES = 33.42e6  # recurrent state of a sequence, read every step
_KV_BYTES = 20_480  # keys and values of one position
_MTP_DENSE, _MTP_ACTIVE = 535_822_336, 564_133_888
_BLOCK_SIZE, _BLOCK_ELEMENTS = 16, 982_515_712


def distinct_with_replacement(count: int, active: int, tokens: float) -> float:
    """Expected distinct experts of `count` when each of `tokens` picks `active` that may coincide, as the source
    counts them: E (1 - (1 - 1/E)^(k t)). The cost model's own count is wager.planner.routing.distinct_experts."""
    missed: float = (1 - 1 / count) ** (active * tokens)
    return count * (1 - missed)


class PublishedLatency(LatencyModel):
    """Behind published measurements of two drafters: Qwen3.6-35B-A3B in bf16 on a B200. The larger of bytes / bandwidth
    and FLOPs / peak, one maximum over the pass as in the source.

    Source: as in wager/economics/acceptance.py, whose table of tokens per second from 1 to 2048 requests this fits
    within 4 %, with all of its best depths (test_simulation.py).

    `shapes` are those of the drafters by name: `mtp` (one pass per depth), `block:16` (one pass over a block, the same
    at every depth) or `free`.
    """

    def __init__(self, shapes: Mapping[str, str] | None = None) -> None:
        self.shapes = dict(shapes or {"mtp": "mtp", "dflash": "block:16"})

    def seconds(self, rows: int, requests: int, context_sum: int) -> float:
        if rows <= 0:
            return 0.0
        experts = (distinct_with_replacement(_COUNT, _ACTIVE_EXPERTS, rows) + 1) * _LAYERS * _EXPERT_ELEMENTS * 2
        caches = requests * _STATE_BYTES + context_sum * _KV_BYTES
        return max(_DENSE_SECONDS + (experts + caches) / _BANDWIDTH, 2 * _ACTIVE_ELEMENTS * rows / _PEAK)

    def draft_seconds(self, drafter: str, requests: int, depth: int) -> float:
        shape = self.shapes[drafter]
        if requests <= 0 or depth <= 0 or shape == "free":
            return 0.0
        if shape == "mtp":
            experts = 1 + distinct_with_replacement(_COUNT, _ACTIVE_EXPERTS, requests)
            elements = _MTP_DENSE + experts * _EXPERT_ELEMENTS
            return depth * max(2 * _MTP_ACTIVE * requests / _PEAK, 2 * elements / _BANDWIDTH)
        return max(2 * _BLOCK_ELEMENTS * requests * _BLOCK_SIZE / _PEAK, 2 * _BLOCK_ELEMENTS / _BANDWIDTH)
