"""For tests: a target with a closed-form distribution, drafters of known acceptance, a manual clock.

It is part of the package so that users can test their own drafter or policy against a target whose output is known.
"""

from wager.testing.drafters import (
    PROOF_DRAFTERS,
    AdversaryDrafter,
    HistoryDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    ReferenceOracle,
    SetAcceptanceDrafter,
    TargetOracle,
    ToyOracle,
)
from wager.testing.toy import FakeClock, ToyCache, ToyDistribution, ToyTarget, toy_engine

__all__ = [
    "PROOF_DRAFTERS",
    "AdversaryDrafter",
    "FakeClock",
    "HistoryDrafter",
    "OracleDrafter",
    "RandomTreeDrafter",
    "ReferenceOracle",
    "SetAcceptanceDrafter",
    "TargetOracle",
    "ToyCache",
    "ToyDistribution",
    "ToyOracle",
    "ToyTarget",
    "toy_engine",
]
