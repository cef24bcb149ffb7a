"""Which files of a folder are pickled weights, which are never read here: a pickle may run any code."""

from __future__ import annotations

from pathlib import Path

_PATTERNS = ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "*lm_head.pt", "model.pt")
"""As transformers and the repositories of EAGLE and Medusa name them; others, such as optimizer.pt, are none."""


def pickled_weights(folder: Path) -> list[Path]:
    """The files, in order of their names."""
    return sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})
