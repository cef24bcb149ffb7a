"""The feed-forward part of a layer: one gated network, or a mixture of experts with its router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wager.errors import UsageError


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward (SwiGLU) of inner size `width`: gate, up and down projection."""

    width: int

    def weights(self, hidden: int) -> int:
        """Elements of the three projections."""
        return 3 * hidden * self.width


@dataclass(frozen=True, slots=True)
class Gating:
    """How a router chooses a row's experts and weights their outputs.

    A row's scores are the softmax or the sigmoid of its router's logits. With `correction_bias`, a learned bias is
    added to them for the choice alone (DeepSeek-V3). With `groups` above 1 the experts form that many equal groups and
    only those in the `top_groups` best groups are eligible; a group's score is the sum of its `group_best` best scores.
    The weights of the chosen experts are their scores, divided by their sum where `normalised`, times `scale`.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: `count` routed SwiGLU experts of inner size `width`, `active` of them per token, and
    `shared` ones of inner size `shared_width` (None: `width`) that every token uses.

    The cost of a mixture does not depend on `gating`, which only the engine reads.
    """

    count: int
    active: int
    shared: int
    width: int
    shared_width: int | None = None
    gating: Gating = Gating()

    def __post_init__(self) -> None:
        if not 0 < self.active <= self.count or self.shared < 0 or self.width < 1:
            raise UsageError(
                f"{self.count} experts of width {self.width} with {self.active} active and {self.shared} shared "
                "are not a layer.",
                "Between one and all of the experts are active.",
            )

    @property
    def shared_inner(self) -> int:
        """Inner size of all shared experts together, 0 for none."""
        return self.shared * (self.shared_width or self.width)

    def expert(self, hidden: int) -> int:
        """Elements of one routed expert."""
        return 3 * hidden * self.width

    def shared_weights(self, hidden: int) -> int:
        """Elements of all shared experts."""
        return 3 * hidden * self.shared_inner

    def router(self, hidden: int) -> int:
        """Elements of the router's matrix."""
        return hidden * self.count
