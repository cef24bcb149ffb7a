"""What it costs to spread a step over devices: all-reduces of tensor parallelism, dispatch of expert parallelism.

Bytes over published link speeds; a link whose speed is not published is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wager.arch import Experts, ModelSpec
from wager.economics.costmodel.devices import Device
from wager.errors import UsageError


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a device sends in a step, and the seconds they take."""

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """`tp` devices that split every matrix, or `ep` ranks that split the experts."""

    device: Device
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1:
            raise UsageError(f"tp = {self.tp}, ep = {self.ep} is out of range.", "Both are 1 or more.")
        if self.tp > 1 and self.ep > 1:
            raise UsageError("Tensor and expert parallelism together are not modelled.", "Leave one of tp and ep at 1.")
        if self.tp > 1 and self.device.intra is None:
            raise self._unknown("between devices of a node")
        if self.ep > 1 and (self.device.intra is None or self.device.node is None):
            raise self._unknown("between devices of a node, or how many a node has")
        if self.tp > 1 and self.device.node is not None and self.tp > self.device.node:
            raise UsageError(
                f"tp = {self.tp} is more than the {self.device.node} devices of a node.", "Use a smaller tp."
            )
        if self.ep > 1 and self.device.node is not None and self.ep > self.device.node and self.device.inter is None:
            raise self._unknown("between nodes")

    def _unknown(self, where: str) -> UsageError:
        return UsageError(
            f"The link speed of {self.device.name} {where} is not known.",
            "Describe the machine in a JSON file with its links.",
        )

    @property
    def devices(self) -> int:
        return max(self.tp, self.ep)

    def traffic(self, model: ModelSpec, rows: float) -> Mapping[str, Transfer]:
        """What is sent, by kind, in a step of `rows` rows (of one rank, under expert parallelism)."""
        transfers = {}
        if self.tp > 1 and self.device.intra is not None:
            # two all-reduces a layer, each a ring: 2 (n - 1) / n of the activations through every link
            sent = (
                2 * model.num_layers * rows * model.hidden * model.precision.activations * 2 * (self.tp - 1) / self.tp
            )
            transfers["all-reduce"] = Transfer(sent, sent / self.device.intra)
        if self.ep > 1:
            layers = [layer for layer in model.layers if isinstance(layer.ffn, Experts)]
            copies = sum(layer.count * layer.ffn.active for layer in layers if isinstance(layer.ffn, Experts))
            sent = rows * 2 * copies * model.hidden * model.precision.dispatch
            transfers["dispatch"] = Transfer(sent, sent * self._seconds_per_byte())
        return transfers

    def _seconds_per_byte(self) -> float:
        """Of a dispatched byte whose expert may be anywhere: the slower of the links, which work side by side.

        max((f_on - f_local) / intra, f_off / inter), f_local = 1/w, f_on = min(1, M/w), f_off = max(0, 1 - M/w) for w
        ranks in nodes of M.
        """
        near = 0.0 if self.device.node is None else min(1.0, self.device.node / self.ep)
        local, far = min(1.0, 1 / self.ep), 1.0 - near
        inside = (near - local) / self.device.intra if self.device.intra else 0.0
        return max(inside, far / self.device.inter if far > 0 and self.device.inter else 0.0)
