"""How many rows of a step prompts may take, in plain Python: what csrc/step_state.h does, which says why."""

from __future__ import annotations

from wager.types import StepRecord

FIRST_ROWS, LEAST_ROWS = 64, 24
LONGEST_WAIT_S, LONGEST_PROMPT_STEP_S = 0.02, 0.06
NEW, NEW_SLOWER, MOST_GROWTH = 0.5, 0.05, 4.0


class PlainPromptRows:
    """See PromptRows."""

    def __init__(self, *, most: int | None = None) -> None:
        self.most = most
        self.decode_s = self.row_s = 0.0

    def limit(self, *, decoding: int, streamed: bool) -> int | None:
        if self.most is not None:
            return self.most if decoding else None
        if not streamed:
            return None
        if not self.row_s:
            return FIRST_ROWS if decoding else None
        longest = LONGEST_WAIT_S if decoding else LONGEST_PROMPT_STEP_S
        return self.rows_in(max(longest, self.decode_s))

    def beside_others(self, *, streamed: bool) -> int | None:
        if self.most is not None or not streamed:
            return self.most
        return self.rows_in(LONGEST_WAIT_S) if self.row_s else FIRST_ROWS

    def rows_in(self, seconds: float) -> int:
        return max(LEAST_ROWS, int(seconds / max(self.row_s, 1e-9)))

    def observe(self, record: StepRecord) -> None:
        seconds = sum(record.seconds.values())
        if record.decodes_only:
            self.decode_s = mean(self.decode_s, seconds, NEW if seconds < self.decode_s else NEW_SLOWER)
            return
        prompts = record.rows - record.drafted - record.sequences
        if prompts > 0:
            self.row_s = mean(self.row_s, max(0.0, seconds - self.decode_s) / prompts, NEW)


def mean(known: float, seconds: float, weight: float) -> float:
    return known + (min(seconds, MOST_GROWTH * known) - known) * weight if known else seconds


def rows_kept_for_guesses(max_rows: int, *, decoding: int, drafts: int, recent: int) -> int:
    least = max(decoding, max_rows // 16)
    return min(drafts * decoding, max(least, 2 * recent), (max_rows - decoding) // 2)
