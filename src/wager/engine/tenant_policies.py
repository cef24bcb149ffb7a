"""A policy for each tenant: what it learns of the acceptance of one tenant's texts decides nothing for another's.

Tenants whose sequences run at the same time share steps, and with them prices and rows: these are decided together, by
one further policy that learns from such steps alone. What a step takes is learned for all of them, in the latency model
that they share: it is a fact of the machine, not of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from wager.economics.policy.base import Policy, WrappedPolicy
from wager.engine.sequence import EngineSequence
from wager.tenants import PerTenant
from wager.types import NO_TENANT, Plan, Span


class TenantPolicies(WrappedPolicy):
    """Decides as the policy of the tenant whose sequences run, or as the one for several. `make` makes each of them,
    with the same latency model; `sequences` are the engine's."""

    def __init__(self, make: Callable[[], Policy], sequences: Mapping[str, EngineSequence]) -> None:
        self._make, self._sequences = make, sequences
        self._policies = PerTenant(make)
        self._of_several: Policy | None = None
        self._weights: dict[str, float] = {}  # of the sequences that have begun and not ended
        self._waiting: list[str] = []  # those of them that the policy does not know yet
        self._left_out: frozenset[str] = frozenset()  # drafters
        self._ended = False  # whether one has ended since the policy was chosen
        super().__init__(self._policies.get(NO_TENANT))

    def begin(self, sequence: str, *, weight: float) -> None:
        self._policies.enter(sequence, self._sequences[sequence].tenant)
        self._weights[sequence] = weight
        self._waiting.append(sequence)

    def end(self, sequence: str) -> None:
        if self._weights.pop(sequence, None) is None:
            return
        self._policies.leave(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self.policy.end(sequence)
        self._ended = True

    def leave_out(self, drafters: frozenset[str]) -> None:
        self._left_out = drafters
        self.policy.leave_out(drafters)

    def plan(self, spans: Sequence[Span], budget: int) -> Plan:
        if self._waiting or self._ended:
            self._choose()
        return self.policy.plan(spans, budget)

    def _choose(self) -> None:
        """Between two steps: a policy is not changed while it observes one."""
        chosen = self._chosen()
        if chosen is not self.policy:
            known = self._weights.keys() - set(self._waiting)
            for sequence in self._weights:
                if sequence in known:
                    self.policy.end(sequence)
            self.policy, self._waiting = chosen, list(self._weights)
            chosen.leave_out(self._left_out)
        for sequence in self._waiting:
            chosen.begin(sequence, weight=self._weights[sequence])
        self._waiting, self._ended = [], False

    def _chosen(self) -> Policy:
        tenants = self._policies.present
        if len(tenants) == 1:
            return self._policies.get(next(iter(tenants)))
        if tenants and self._of_several is None:
            self._of_several = self._make()
        return (tenants and self._of_several) or self.policy
