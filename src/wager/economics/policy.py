"""Policies: how many guesses each sequence may make, and which of them are worth verifying.

A policy sees spans and drafts and returns plans and drafts; it knows neither tensors nor the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from wager.types import Draft, Plan, Span, StepRecord


class Policy(Protocol):
    def plan(self, spans: Sequence[Span]) -> Plan:
        """Depth of drafting per sequence, before any guess is made."""

    def admit(self, drafts: Mapping[str, Draft]) -> Mapping[str, Draft]:
        """The guesses that are worth verifying at this step's price."""

    def observe(self, record: StepRecord) -> None:
        """What the step cost and brought."""


class FixedDepth:
    """The same depth for every sequence and step, as far as its span has room."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def plan(self, spans: Sequence[Span]) -> Plan:
        return Plan({span.sequence: min(self.depth, span.room) for span in spans if span.live and span.room})

    def admit(self, drafts: Mapping[str, Draft]) -> Mapping[str, Draft]:
        return drafts

    def observe(self, record: StepRecord) -> None:
        del record  # a fixed depth learns nothing
