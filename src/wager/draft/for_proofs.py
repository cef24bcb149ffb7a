"""The drafters that are made for proofs, by name."""

from __future__ import annotations

from wager.draft.base import Drafter
from wager.draft.history import TargetOracle


def proof_drafter(name: str, vocab: int, *, oracle: TargetOracle | None = None) -> Drafter:
    """One for a target of `vocab` logits; with an `oracle` it knows what the target will emit."""
    if name == "adversary":
        from wager.draft.adversary import AdversaryDrafter

        return AdversaryDrafter(vocab, oracle=oracle)
    if name == "random-tree":
        from wager.draft.random_tree import RandomTreeDrafter

        return RandomTreeDrafter(vocab, oracle=oracle)
    if name == "killed":
        from wager.draft.killed import KilledDrafter

        return KilledDrafter(oracle=oracle)
    from wager.draft.broken import GarbageDrafter, RaisingDrafter

    return {"garbage": GarbageDrafter, "failing": RaisingDrafter}[name](vocab, oracle=oracle)
