"""Some of the target's own layers as a draft model: those up to an early exit, or all but some that are skipped.

Self-speculation (Draft & Verify, arXiv 2309.08168; LayerSkip, 2404.16710): the layers, the last norm and the head are
the target's, so nothing is trained and, where packed weights are mapped from a file, nothing is stored twice. The draft
model has a cache of its own for its layers.
"""

from __future__ import annotations

import re

from wager.errors import UsageError
from wager.inputs import shown


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """The layers of `0-9.20-29`, from 0, ascending; `count` is how many the model has. UsageError for a text that is
    not such, layers that the model does not have, and all of its layers."""
    layers: list[int] = []
    for part in text.split("."):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if not match:
            raise UsageError(f"Layers {shown(text)} cannot be read.", "Write 0-9, or 0-9.20-29.")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or (layers and first <= layers[-1]):
            raise UsageError(f"Layers {shown(text)} are not in ascending order.", "Write 0-9.20-29.")
        if last >= count:
            raise UsageError(
                f"Layer {last} of {shown(text)} does not exist.", f"The model has layers 0 to {count - 1}."
            )
        layers += range(first, last + 1)
    if len(layers) == count:
        raise UsageError(f"Layers {shown(text)} are all that the model has.", "Leave some out: guesses must cost less.")
    return tuple(layers)
