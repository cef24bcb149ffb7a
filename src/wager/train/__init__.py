"""Trains drafters of a target: its data, the target's states, draft modules, losses, the loop, checkpoints, exports.

The only package that imports torch, which the extra `wager[train]` installs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wager.errors import UsageError, WagerError


def require_torch() -> None:
    """UsageError unless torch can be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Training needs PyTorch, which cannot be imported ({error}).", "Install it: pip install 'wager[train]'."
        ) from error


def run_on_folders(arguments: Sequence[str], work: Callable[..., Path], *, count: int, asked: str, usage: str) -> int:
    """The command of a module: `work` on `count` folders, and a line that says where its result is. The exit status;
    `asked` and `usage` are what is said where other arguments are given."""
    try:
        if len(arguments) != count or any(argument.startswith("-") for argument in arguments):
            raise UsageError(asked, usage)
        sys.stdout.write(f"written to {work(*(Path(argument).expanduser() for argument in arguments))}\n")
    except WagerError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        sys.stderr.write(f"The system refuses: {error.filename}: {error.strerror}.\n")
        return 1
    return 0
