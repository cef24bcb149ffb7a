"""How the rows of a step are shared out where it decodes, verifies guesses and computes prompts."""

from __future__ import annotations

_LEAST_SHARE = 16
"""While prompts are computed, at least one of this many rows is left to guesses."""

_LEAST_PREFILL_ROWS, _PREFILL_ROWS_EACH = 96, 24
"""Rows of prompts in a step in which others decode, by how many these are. Where few decode, a whole prompt would make
their step many times as long; where many do, as many prompts wait, and chunks that are short keep those waiting."""


def rows_kept_from_prompts(max_rows: int, *, decoding: int, drafts: int, recent: int, most: int | None) -> int:
    """Of the rows that `decoding` sequences leave of `max_rows`, those that prompts do not get: for guesses twice what
    these lately took (`recent`), so that they can grow, and half of all rows at most; and, where sequences decode, all
    beyond `most` rows of prompts (None: more for more of them), since their next tokens wait for the step. `drafts`
    is the most guesses of a sequence."""
    least = max(decoding, max_rows // _LEAST_SHARE)
    for_guesses = min(drafts * decoding, max(least, 2 * recent), max_rows // 2)
    if not decoding:
        return for_guesses
    prompts = most or max(_LEAST_PREFILL_ROWS, _PREFILL_ROWS_EACH * decoding)
    return max(for_guesses, max_rows - decoding - prompts)
