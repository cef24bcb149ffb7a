"""Times drafting: seconds of a drafter's call by number of requests and depth.

No target runs: the texts are made up, and a drafter that reads the target's states or rows is shown random ones, since
no drafter's time depends on their values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from wager.economics.calibration import REQUESTS
from wager.economics.surface import DraftCurve, DraftPoint, fit_draft_curve
from wager.engine.proposer import Proposer
from wager.errors import UsageError
from wager.kernels.base import TargetOutput
from wager.trace import Clock
from wager.types import DraftRequest, Outcome, SamplingParams, Span, Verdict

_DEPTHS = (1, 2, 4, 8)
_ROUNDS = 12
_PERIOD, _PROMPT = 11, 44
"""Tokens after which a text repeats, and tokens of its prompt."""

_GREEDY = SamplingParams(ignore_eos=True)


def time_drafting(
    proposer: Proposer,
    *,
    vocab: int,
    hidden: int,
    seconds: float,
    clock: Clock,
    tokens: int | None = None,
    between: Callable[[], object] = lambda: None,
    batches: Sequence[int] = REQUESTS,
) -> DraftCurve:
    """Seconds of drafting by requests (`batches`, ascending) and depth, timed for about `seconds` or a dozen rounds,
    whichever ends first. `vocab` and `hidden` are the target's numbers of logits and of elements of a state; texts
    are made of ids below `tokens` (None: `vocab`), since a draft model may lack the target's padding.

    The texts are periodic, so that lookup drafters find continuations. `between` is called before each call, as a pass
    of the target would be: it leaves the processor's caches cold. Calls in which a request got no draft are not
    counted; UsageError if there is no other.
    """
    name, seq_ids = proposer.name, [f"text {i}" for i in range(batches[-1])]
    rng = random.Random(0)
    texts = {seq_id: _PeriodicText(rng, vocab if tokens is None else tokens) for seq_id in seq_ids}
    target = _RandomPasses(proposer, vocab=vocab, hidden=hidden) if proposer.readers.reads_passes else None
    for seq_id in seq_ids:
        proposer.begin(seq_id, texts[seq_id].known, _GREEDY)
    _grow(proposer, texts, target)
    calls = [(requests, depth) for requests in batches for depth in _DEPTHS]
    taken: dict[tuple[int, int], list[float]] = {}
    begun, rounds = clock(), 0
    while rounds < _ROUNDS and (rounds < 2 or clock() - begun < seconds):
        rng.shuffle(calls)
        for requests, depth in calls:
            chosen = {seq_id: texts[seq_id] for seq_id in seq_ids[:requests]}
            between()
            took = _seconds_of_call(proposer, chosen, depth, clock=clock)
            _grow(proposer, chosen, target)
            if took and rounds:  # the first round computes prompts
                taken.setdefault((requests, depth), []).append(took)
        rounds += 1
    for seq_id in seq_ids:
        proposer.end(seq_id)
    if not taken:
        raise UsageError(f"Drafter {name!r} made no draft that could be timed.", "Leave it out of --drafter.")
    return fit_draft_curve([DraftPoint(*call, median(times)) for call, times in taken.items()])


class _PeriodicText:
    """A text that repeats a few tokens without end. `computed`: its first tokens that the target has seen."""

    def __init__(self, rng: random.Random, vocab: int) -> None:
        self._period = [rng.randrange(vocab) for _ in range(_PERIOD)]
        self.known = [self.token(index) for index in range(_PROMPT)]
        self.computed = 0

    def token(self, index: int) -> int:
        return self._period[index % _PERIOD]


class _RandomPasses:
    """Passes of a target for a drafter that reads them, of random states and logits."""

    def __init__(self, proposer: Proposer, *, vocab: int, hidden: int) -> None:
        self._proposer = proposer
        self._vocab, self._hidden = vocab, hidden
        self._rng = np.random.default_rng(0)

    def show(self, texts: Mapping[str, _PeriodicText]) -> None:
        """The pass over what is not computed of each text, after which its next token is known."""
        spans = [
            Span(seq_id, text.computed, tuple(text.known[text.computed :]), needs_logits=True)
            for seq_id, text in texts.items()
        ]
        outcomes = {
            seq_id: Outcome(Verdict(seq_id, (), (text.token(len(text.known)),))) for seq_id, text in texts.items()
        }
        rows = sum(len(span.tokens) for span in spans)
        states = self._rng.standard_normal((rows, self._hidden), np.float32)
        output = TargetOutput(
            logits=self._rng.standard_normal((len(spans), self._vocab), np.float32),
            greedy_tokens=np.array([outcome.verdict.tokens[0] for outcome in outcomes.values()], np.int32),
            last_hidden=states[: len(spans)],
            taps=dict.fromkeys(self._proposer.readers.taps, states),
        )
        self._proposer.readers.show(output, spans, {}, outcomes)


def _grow(proposer: Proposer, texts: Mapping[str, _PeriodicText], target: _RandomPasses | None) -> None:
    """One more token becomes known of every text."""
    if target:
        target.show(texts)
    for seq_id, text in texts.items():
        text.computed = len(text.known)
        text.known.append(text.token(len(text.known)))
        proposer.accept(seq_id, text.known[-1:])


def _seconds_of_call(
    proposer: Proposer, texts: Mapping[str, _PeriodicText], depth: int, *, clock: Clock
) -> float | None:
    """Seconds of one call; None if a request got no draft."""
    begun = clock()
    requests = [
        DraftRequest(seq_id, len(text.known), depth, _GREEDY, seed=0, choice=0) for seq_id, text in texts.items()
    ]
    drafts = proposer.draft(requests, dict.fromkeys(texts, depth), drafter=proposer.name)
    took = clock() - begun
    return took if len(drafts) == len(texts) else None
