"""Trains drafters of a target: its data, the target's states, draft modules, losses, the loop, checkpoints, exports.

The only package that imports torch, which the extra `wager[train]` installs.
"""

from __future__ import annotations

from wager.errors import UsageError


def require_torch() -> None:
    """UsageError unless torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Training needs PyTorch, which cannot be imported ({error}).", "Install it: pip install 'wager[train]'."
        ) from error
