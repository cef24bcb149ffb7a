"""One choice of one request while it runs: its request, its text, and the state that the scheduler writes.

Tokens become text one at a time. Text that might be the beginning of a stop string is held back until it is known not
to be one, so that streamed text is never withdrawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wager.engine.outputs import TokenDecoder
from wager.kernels._native import SequenceState
from wager.types import GREEDY_TEMPERATURE, FinishReason, GrammarState, Request, Stats
from wager.verify.distribution import History

_MOST_TOKENS = 2**63 - 1


def sequence_id(request_id: str, choice: int) -> str:
    """Choice 0 has the request's own id; the others add their number."""
    return request_id if choice == 0 else f"{request_id}#{choice}"


class EngineSequence:
    """What a step changes (tokens, blocks, counts) is `state`, which the scheduler alone writes; the rest is here."""

    def __init__(
        self,
        request: Request,
        choice: int,
        *,
        seed: int,
        text: Detokenizer | None,
        eos: Collection[int],
        drafter: str,
    ) -> None:
        params = request.params
        self.id = sequence_id(request.id, choice)
        self.request, self.request_id = request, request.id
        self.params = params
        self.tenant = request.tenant
        self.prompt_tokens = len(request.prompt)
        self.choice = choice
        self.seed = seed
        self.drafter = drafter
        self.text = text
        self.constrained = params.grammar is not None
        """Whether its output follows a grammar, which may end it."""
        self._cut_by_text = self.constrained or (text is not None and text.may_stop)
        tokens_alone = params.filters_only and params.logprobs is None
        self._stop_ids = [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
        self.state = SequenceState(
            id=self.id,
            request_id=request.id,
            choice=choice,
            tokens=request.prompt,
            max_length=min(len(request.prompt) + params.max_tokens, _MOST_TOKENS),
            stop_ids=self._stop_ids,
            tenant=request.tenant,
            seed=seed,
            temperature=float(params.temperature) if tokens_alone else None,
            filters=params.filters,
            greedy=GREEDY_TEMPERATURE,
            streamed=request.streamed,
        )
        self._history: History | None = None
        self._in_history = 0

    @property
    def history(self) -> History | None:
        """What penalties and grammar depend on, kept from when it is first asked for; None if there are none."""
        if self._history is None:
            self._history = History.of(self.request.prompt, self.params, stop_ids=self._stop_ids)
            self._in_history = self.prompt_tokens
        if self._history is not None and self._in_history < self.num_tokens:
            self._history.append(self.state.tokens_from(self._in_history))
            self._in_history = self.num_tokens
        return self._history

    @property
    def grammar(self) -> GrammarState | None:
        """How far its output has come in its grammar, if it has one."""
        history = self.history
        return None if history is None else history.grammar

    @property
    def tokens(self) -> list[int]:
        """A copy of its tokens, prompt and output."""
        return self.state.tokens_from(0)

    @property
    def num_tokens(self) -> int:
        return self.state.num_tokens

    def add_text(
        self, tokens: Sequence[int], finish_reason: FinishReason | None
    ) -> tuple[str, int, FinishReason | None]:
        """The text that becomes certain with tokens that follow, the number of them that are kept, and why the sequence
        ends if it does: a stop string or the grammar may end it before `finish_reason` does. A last token that is a
        stop token has no text."""
        shown = tokens[:-1] if finish_reason == "stop" else tokens
        if self._cut_by_text:
            return self._cut_text(tokens, shown, finish_reason)
        if self.text is None:
            return "", len(tokens), finish_reason
        text = "".join(map(self.text.decoder.push, shown))
        return text if finish_reason is None else text + self._flush(), len(tokens), finish_reason

    def _cut_text(
        self, tokens: Sequence[int], shown: Sequence[int], finish_reason: FinishReason | None
    ) -> tuple[str, int, FinishReason | None]:
        text = ""
        for index, token in enumerate(shown):
            if self.text is not None:
                text += self.text.push(token)
                if self.text.stopped:
                    return text, index + 1, "stop"
            if self.constrained and self._ends_grammar(token):
                return text + self._flush(), index + 1, "stop"
        return text if finish_reason is None else text + self._flush(), len(tokens), finish_reason

    def _ends_grammar(self, token: int) -> bool:
        """Whether this token, the next one that is kept, completes the output."""
        history = self.history
        if history is None or history.grammar is None:
            return False
        history.append([token])
        self._in_history += 1
        return history.grammar.complete()

    def _flush(self) -> str:
        return self.text.flush() if self.text else ""

    def stats(self) -> Stats:
        state = self.state
        started = state.first_token_at >= 0
        return Stats(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=state.num_tokens - self.prompt_tokens,
            seed=self.seed,
            cached_tokens=state.cached_tokens,
            prefill_s=state.first_token_at - state.admitted_at if started else 0.0,
            decode_s=state.last_token_at - state.first_token_at if started else 0.0,
            rounds=state.rounds,
            drafted=state.drafted,
            accepted=state.accepted,
            preemptions=state.preemptions,
            drafter=self.drafter,
        )


class Detokenizer:
    """Text of one choice. `stopped` turns true at the first stop string, `stopped_by`; what follows it is never shown.
    The text of the first `min_tokens` tokens holds none."""

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self.decoder = decoder
        self._free = min_tokens  # tokens to come in which no stop string is looked for
        self._stop = tuple(stop)
        self._prefixes = [_HeldPrefix(each) for each in self._stop]
        self._held = ""
        self.stopped_by = ""
        self.may_stop = bool(stop)

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by)

    def push(self, token: int) -> str:
        """Text that became certain with this token."""
        text = self.decoder.push(token)
        if self._free:
            self._free -= 1
            return text
        return self._advance(text, last=False) if self._stop else text

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        return self._advance(self.decoder.flush(), last=True)

    def _advance(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: each[0])
            shown, self._held = self._held[:at], ""
            return shown
        keep = 0 if last else max((prefix.push(text) for prefix in self._prefixes), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


class _HeldPrefix:
    """How much of a stop string the text may have begun, by Knuth, Morris and Pratt: a few operations a character,
    however long the string is."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # of each prefix met so far, the longest proper prefix of it that also ends it
        self._length = 0

    def push(self, text: str) -> int:
        """The length of the longest end of all text so far that is a prefix of the stop string. The string itself must
        not have come."""
        stop, borders, length = self._stop, self._borders, self._length
        for character in text:
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            if length > len(borders):
                border = borders[-1]
                while border and stop[border] != character:
                    border = borders[border - 1]
                borders.append(border + (stop[border] == character))
        self._length = length
        return length
