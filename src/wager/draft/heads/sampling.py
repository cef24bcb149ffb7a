"""Guesses by a head's logits: drawn in the head's own pass where a request has nothing but a temperature, else by the
target's ids in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wager.draft.guessing import Guess, GuessedChain, GuessSampler
from wager.models.head_files import HeadLogits, HeadOutput
from wager.types import DraftRequest, SamplingParams
from wager.verify.distribution import History


def drawing_temperature(params: SamplingParams) -> float | None:
    """The temperature (0: greedy) of a request whose token is argmax(z / T + g) over all ids; None of any other."""
    if not params.plain:
        return None
    return 0.0 if params.greedy else params.temperature


class HeadChain(GuessedChain):
    """A chain that is drawn in the head's pass with `temperature`, or behind it where that is None: a request of
    another kind, or one whose q is to be told."""

    def __init__(
        self, request: DraftRequest, history: History | None, depth: int, *, temperature: float | None
    ) -> None:
        super().__init__(request, history, depth)
        self.temperature = None if temperature and request.needs_draft_probs else temperature


class HeadSampler(GuessSampler):
    """See GuessSampler, for a pass that gives a row of logits to each of some chains."""

    def set_keys(self, to: HeadLogits, rows: Sequence[tuple[HeadChain, int]]) -> None:
        """Before the pass: the chain that each row is of, and how many guesses stand before it."""
        for index, (chain, ahead) in enumerate(rows):
            request = chain.request
            to.keys[index] = (chain.temperature or 0.0, request.seed, request.position + ahead, request.choice)

    def drawn(self, output: HeadOutput, chains: Sequence[HeadChain]) -> Iterator[Guess]:
        """After it: the next guess of each."""
        tokens, probabilities, whole = output.tokens.tolist(), output.probabilities.tolist(), None
        for index, chain in enumerate(chains):
            if chain.temperature is not None:
                yield Guess(tokens[index], probabilities[index])
            else:
                whole = whole or output.by_target()
                yield from self.guesses(whole, [chain.row(index)])
