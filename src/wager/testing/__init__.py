"""Public toys: a target with a closed-form law, drafters with known skill, a clock that obeys.

Nothing here is used to serve a request; it ships so that anyone can test an engine, a drafter or a policy against a
target whose every answer is known.
"""

from wager.testing.broken import DyingDrafter, OutsideVocabularyDrafter, OverlongDrafter, SilentDrafter, TwinDrafter
from wager.testing.clock import FakeClock
from wager.testing.drafters import (
    AdversaryDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    ReferenceOracle,
    Seer,
    SetAcceptanceDrafter,
    ToyOracle,
)
from wager.testing.toy import ToyCache, ToyDistribution, ToyTarget

__all__ = [
    "AdversaryDrafter",
    "DyingDrafter",
    "FakeClock",
    "OracleDrafter",
    "OutsideVocabularyDrafter",
    "OverlongDrafter",
    "RandomTreeDrafter",
    "ReferenceOracle",
    "Seer",
    "SetAcceptanceDrafter",
    "SilentDrafter",
    "ToyCache",
    "ToyDistribution",
    "ToyOracle",
    "ToyTarget",
    "TwinDrafter",
]
