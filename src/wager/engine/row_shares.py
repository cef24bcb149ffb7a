"""How the rows of a step are shared out where it decodes, verifies guesses and computes prompts."""

from __future__ import annotations

from wager.types import StepRecord

_LEAST_SHARE = 16
"""While prompts are computed, at least one of this many rows is left to guesses."""

_FIRST_ROWS, _LEAST_ROWS = 96, 32
"""Rows of prompts in a step in which others decode: before it is known what one takes, and however long one takes. With
fewer, what a row takes could not be told from what a step takes anyway."""

_LONGEST_WAIT_S, _LONGEST_PROMPT_STEP_S = 0.03, 0.1
"""Seconds that prompts may add to a step in which others decode, and that a step of prompts alone may take, for which
whoever arrives meanwhile waits. A step of twice the rows computes a row little faster: even 0.03 s are ten times what
reading the weights takes."""

_NEW, _MOST_GROWTH = 0.5, 4.0
"""Weight of a new step in what a row of a prompt takes: it follows quickly, since rows of a long context take longer.
But a step in which the machine stood still counts as this many times the usual at most."""


class PromptRows:
    """Bounds the rows of prompts in a step by the seconds that they add, as observed in the last steps: at most 0.03 s
    where others decode, or what the step takes without them if that is more. `most`: a fixed bound instead."""

    def __init__(self, *, most: int | None = None) -> None:
        self._most = most
        self._decode_s = 0.0  # of a step without prompts
        self._row_s = 0.0  # 0: not known

    def limit(self, *, decoding: int) -> int | None:
        """Rows of prompts in a step in which so many sequences decode, None: any number."""
        if self._most is not None:
            return self._most if decoding else None
        if not self._row_s:
            return _FIRST_ROWS if decoding else None
        longest = max(_LONGEST_WAIT_S, self._decode_s) if decoding else max(_LONGEST_PROMPT_STEP_S, self._decode_s)
        return max(_LEAST_ROWS, int(longest / self._row_s))

    def observe(self, record: StepRecord) -> None:
        """What a step took."""
        seconds = sum(record.seconds.values())
        if record.decodes_only:
            self._decode_s = _mean(self._decode_s, seconds)
            return
        prompts = record.rows - record.drafted - record.sequences  # but for the last row of each, which may decode
        if prompts > 0:
            self._row_s = _mean(self._row_s, max(0.0, seconds - self._decode_s) / prompts)


def _mean(known: float, seconds: float) -> float:
    return known + (min(seconds, _MOST_GROWTH * known) - known) * _NEW if known else seconds


def rows_kept_for_guesses(max_rows: int, *, decoding: int, drafts: int, recent: int) -> int:
    """Rows that prompts leave to the guesses of `decoding` sequences: twice what these lately took (`recent`), so that
    they can grow, and half of all rows at most. `drafts` is the most guesses of a sequence."""
    least = max(decoding, max_rows // _LEAST_SHARE)
    return min(drafts * decoding, max(least, 2 * recent), max_rows // 2)
