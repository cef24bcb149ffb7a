"""Costs of drafters built from others: one that speculates itself, and one on a device of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from wager.economics.acceptance import survival
from wager.planner.devices import Device
from wager.planner.draft_cost import DraftCost, DraftModelCost
from wager.planner.links import DrafterLink
from wager.planner.roofline import SequenceLoad

_TOKEN_BYTES = 4
"""Of a token id sent over a link."""


@dataclass(frozen=True, slots=True)
class StagedDraftCost(DraftCost):
    """A small model that itself speculates (staged speculative decoding, arXiv 2308.04623): `inner` guesses
    `inner_depth` tokens, a pass of the small model over inner_depth + 1 rows verifies them, and so on until the draft
    is long enough. Its guesses are accepted at the rate `acceptance`.

    A pass gives i + 1 tokens with probability a^i (1 - a), and inner_depth + 1 with a^inner_depth. With u_i the
    probability that a sequence still lacks tokens before pass i, pass i is made with probability 1 - (1 - u_i)^B, over
    the B u_i sequences that lack some: a batch waits for the slowest of its sequences.
    """

    model: DraftModelCost
    inner: DraftCost
    acceptance: float
    inner_depth: int

    @property
    def name(self) -> str:
        return f"staged:{self.model.cost.model.name},{self.inner.name}"

    @property
    def max_context(self) -> int | None:
        return self.model.max_context

    @property
    def resident_bytes(self) -> float:
        return self.model.resident_bytes + self.inner.resident_bytes

    @property
    def device_bytes(self) -> float:
        return self.model.device_bytes + self.inner.device_bytes

    def kv_bytes(self, context: float) -> float:
        return self.model.kv_bytes(context) + self.inner.kv_bytes(context)

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        if depth <= 0 or requests <= 0:
            return 0.0
        inner = min(self.inner_depth, depth - 1)  # a pass gives one token beside the accepted guesses
        total = 0.0
        for lacking in _lacking(depth, self.acceptance, inner=inner):
            made = 1 - (1 - lacking) ** requests
            active = requests * lacking / made if made else 0.0
            load = SequenceLoad(context, inner + 1, active)
            total += made * (self.model.cost.seconds([load]) + self.inner.seconds(active, inner, context=context))
        return total


def _lacking(depth: int, acceptance: float, *, inner: int) -> list[float]:
    """u_1, u_2, ...: the probability that a sequence lacks some of `depth` tokens before each pass."""
    alive = (1.0, *survival(acceptance, inner))
    exactly = [here - after for here, after in zip(alive, (*alive[1:], 0.0), strict=True)]  # i guesses accepted
    missing = [0.0] * depth + [1.0]  # probability of each number of missing tokens, 1 to depth
    lacking: list[float] = []
    while len(lacking) < depth:
        lacking.append(sum(missing[1:]))
        after = [0.0] * (depth + 1)
        for count in range(1, depth + 1):
            for accepted, chance in enumerate(exactly):
                after[max(0, count - accepted - 1)] += missing[count] * chance
        missing = after
    return lacking


@dataclass(frozen=True, slots=True)
class RemoteDraftCost(DraftCost):
    """A drafter on `own_device`, another than the target's.

    Each round two messages pass, one after the other: to the drafter the verified tokens (depth + 1 ids of each
    sequence at most) with the hidden states that a draft head needs, back the depth ids of the draft. Probabilities
    for rejection sampling would come on top; the match rule needs none.
    """

    drafter: DraftCost
    own_device: Device | None = field()  # required, although the base has a property of that name
    link: DrafterLink = field()

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def max_depth(self) -> int | None:
        return self.drafter.max_depth

    @property
    def max_context(self) -> int | None:
        return self.drafter.max_context

    @property
    def resident_bytes(self) -> float:
        return self.drafter.resident_bytes

    @property
    def device_bytes(self) -> float:
        return self.drafter.device_bytes

    def kv_bytes(self, context: float) -> float:
        return self.drafter.kv_bytes(context)

    def hidden_bytes(self, depth: int) -> float:
        return self.drafter.hidden_bytes(depth)

    def seconds(self, requests: float, depth: int, *, context: float) -> float:
        if depth <= 0 or requests <= 0:
            return 0.0
        sent = requests * (self.hidden_bytes(depth) + _TOKEN_BYTES * (2 * depth + 1))
        return self.drafter.seconds(requests, depth, context=context) + self.link.seconds(sent, messages=2)
