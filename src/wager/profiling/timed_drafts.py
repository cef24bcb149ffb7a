"""Times drafting: seconds of a drafter's call by number of requests and depth."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import median

from wager.economics.latency.draft_curve import DraftCurve, DraftPoint
from wager.economics.latency.fit import fit_draft_curve
from wager.economics.latency.shapes import REQUESTS
from wager.engine.proposer import Proposer
from wager.errors import UsageError
from wager.trace import Clock
from wager.types import DraftRequest, SamplingParams

_DEPTHS = (1, 2, 4, 8)
_ROUNDS = 12
_PERIOD, _PROMPT = 11, 44
"""Tokens after which a text repeats, and tokens of its prompt."""

_GREEDY = SamplingParams(ignore_eos=True)


def time_drafting(
    proposer: Proposer, *, vocab: int, seconds: float, clock: Clock, between: Callable[[], object] = lambda: None
) -> DraftCurve:
    """Seconds of drafting by requests and depth, timed for about `seconds` or a dozen rounds, whichever ends first.

    The texts are periodic, so that lookup drafters find continuations. `between` is called before each call, as a pass
    of the target would be: it leaves the processor's caches cold. Calls in which a request got no draft are not
    counted; UsageError if there is no other.
    """
    name, seq_ids = proposer.name, [f"text {i}" for i in range(REQUESTS[-1])]
    rng = random.Random(0)
    texts = {seq_id: _PeriodicText(rng, vocab) for seq_id in seq_ids}
    for seq_id in seq_ids:
        proposer.begin(seq_id, texts[seq_id].known, _GREEDY)
    calls = [(requests, depth) for requests in REQUESTS for depth in _DEPTHS]
    taken: dict[tuple[int, int], list[float]] = {}
    begun, rounds = clock(), 0
    while rounds < _ROUNDS and (rounds < 2 or clock() - begun < seconds):
        rng.shuffle(calls)
        for requests, depth in calls:
            chosen = {seq_id: texts[seq_id] for seq_id in seq_ids[:requests]}
            between()
            took = _seconds_of_call(proposer, chosen, depth, clock=clock)
            if took and rounds:  # the first round computes prompts
                taken.setdefault((requests, depth), []).append(took)
        rounds += 1
    for seq_id in seq_ids:
        proposer.end(seq_id)
    if not taken:
        raise UsageError(f"Drafter {name!r} made no draft that could be timed.", "Leave it out of --drafter.")
    return fit_draft_curve([DraftPoint(*call, median(times)) for call, times in taken.items()])


class _PeriodicText:
    """A text that repeats a few tokens without end."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self._period = [rng.randrange(vocab) for _ in range(_PERIOD)]
        self.known = [self.token(index) for index in range(_PROMPT)]

    def token(self, index: int) -> int:
        return self._period[index % _PERIOD]


def _seconds_of_call(
    proposer: Proposer, texts: Mapping[str, _PeriodicText], depth: int, *, clock: Clock
) -> float | None:
    """Seconds of one call, after which every text grows by a token; None if a request got no draft."""
    begun = clock()
    requests = [
        DraftRequest(seq_id, len(text.known), depth, _GREEDY, seed=0, choice=0) for seq_id, text in texts.items()
    ]
    drafts = proposer.draft(requests, dict.fromkeys(texts, depth), drafter=proposer.name)
    took = clock() - begun
    for seq_id, text in texts.items():
        text.known.append(text.token(len(text.known)))
        proposer.accept(seq_id, text.known[-1:])
    return took if len(drafts) == len(texts) else None
