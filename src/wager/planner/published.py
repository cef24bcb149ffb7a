"""The simplified DeepSeek-V4-Flash on a B200 behind published charts of speculative decoding's cost.

107e6 projection weights, experts of 25.2e6 weights, no head, no router, and either one attention for all 43 layers or
the real mix of layers; the device is B200_CHARTS of devices.py, with rounded ridges. Used to reproduce those charts,
and to show beside the full model what the simplification changes. Source: "The economics of speculative decoding",
fergusfinn.com, June 2026.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wager.arch import Attention, Compressed, Experts, Indexer, Layer, ModelSpec, Precision, Quoted, Stream

_PROJECTIONS = 107_000_000
_EXPERTS = Experts(256, 6, 1, 2000)  # times a hidden size of 4200: 25.2e6 weights each


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
        router=False,
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

PUBLISHED_MODELS = {model.name: model for model in (FLAT_ATTENTION, REAL_LAYERS)}
