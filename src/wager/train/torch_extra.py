"""Whether torch is there: it is an extra, and nothing but training needs it."""

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
