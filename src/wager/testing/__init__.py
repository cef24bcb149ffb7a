"""For tests: a target with a closed-form distribution, drafters of known acceptance, faulty drafters, a manual clock.

It is part of the package so that users can test their own drafter or policy against a target whose output is known.
"""

from wager.draft.adversary import AdversaryDrafter
from wager.draft.history import HistoryDrafter, ReferenceOracle, TargetOracle
from wager.draft.random_tree import RandomTreeDrafter
from wager.testing.clock import FakeClock
from wager.testing.drafters import OracleDrafter, SetAcceptanceDrafter, ToyOracle
from wager.testing.faulty import (
    DecliningDrafter,
    DuplicateSiblingsDrafter,
    FailingDrafter,
    OutsideVocabularyDrafter,
    OverlongDrafter,
)
from wager.testing.toy import ToyCache, ToyDistribution, ToyTarget

__all__ = [
    "AdversaryDrafter",
    "DecliningDrafter",
    "DuplicateSiblingsDrafter",
    "FailingDrafter",
    "FakeClock",
    "HistoryDrafter",
    "OracleDrafter",
    "OutsideVocabularyDrafter",
    "OverlongDrafter",
    "RandomTreeDrafter",
    "ReferenceOracle",
    "SetAcceptanceDrafter",
    "TargetOracle",
    "ToyCache",
    "ToyDistribution",
    "ToyOracle",
    "ToyTarget",
]
