"""The rounds of an answer, for `wager run --rounds`: a few lines a round, a summary, and the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from wager.engine.rounds import Round, RoundSeconds
from wager.types import Draft


class TokenBytes(Protocol):
    """What the texts need of a tokenizer."""

    def token_bytes(self, token_id: int, /) -> bytes: ...


class RoundReport:
    """Collects the rounds of one answer, in order."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self.rounds: list[Round] = []

    def add(self, item: Round) -> str:
        """Take the next round; its lines."""
        self.rounds.append(item)
        return "\n".join(self._lines(len(self.rounds), item))

    def _lines(self, number: int, item: Round) -> list[str]:
        """Each part of a round with its tokens, separated by spaces."""
        tokens = item.draft.tokens
        own = [] if item.target_token is None else [item.target_token]
        parts = [
            (f"guessed by {item.draft.drafter}", self._guesses(item.draft)),
            (f"accepted {len(item.accepted)}", self._shown([tokens[node] for node in item.accepted])),
            (_own_kind(item), self._shown(own)),
            (f"discarded {len(item.discarded)}", self._shown([tokens[node] for node in item.discarded])),
            (f"not verified {len(item.unverified)}", self._shown([tokens[node] for node in item.unverified])),
        ]
        rows = f"{item.rows} row{'s' * (item.rows != 1)}"
        return [
            f"round {number}: {rows}, {_times(item.seconds)}",
            *(f"  {name}: {text}" for name, text in parts if text),
        ]

    def _guesses(self, draft: Draft) -> str:
        """The draft's paths, from the first guess to each last one."""
        inner = set(draft.parents)
        paths = [draft.path(node) for node in range(len(draft)) if node not in inner]
        return " / ".join(self._shown([draft.tokens[node] for node in path]) for path in paths)

    def _shown(self, tokens: Sequence[int]) -> str:
        return " ".join(visible(self._text(token)) for token in tokens)

    def _text(self, token: int) -> str:
        """The token's text; bytes of a character that it holds only in part as \\xNN."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")

    def summary(self) -> str:
        """The sums over all rounds."""
        rounds = self.rounds
        accepted, discarded = sum(len(item.accepted) for item in rounds), sum(len(item.discarded) for item in rounds)
        unverified, emitted = sum(len(item.unverified) for item in rounds), sum(len(item.emitted) for item in rounds)
        kinds = [_own_kind(item) for item in rounds if item.target_token is not None]
        seconds = RoundSeconds(
            sum(item.seconds.draft for item in rounds),
            sum(item.seconds.forward for item in rounds),
            sum(item.seconds.rest for item in rounds),
        )
        own = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return "\n".join(
            [
                f"total: {len(rounds)} rounds, {sum(item.rows for item in rounds)} rows, {_times(seconds)}",
                f"  {accepted + discarded + unverified} guessed: {accepted} accepted, {discarded} discarded, "
                f"{unverified} not verified",
                f"  {emitted} tokens: {accepted} guessed and accepted, {len(kinds)} of the target's own ({own})",
            ]
        )

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rounds for JSON. `text` of all rounds, joined, is the answer."""
        return [
            {
                "drafted": list(item.draft.tokens),
                "drafted_text": [self._text(token) for token in item.draft.tokens],
                "parents": list(item.draft.parents),
                "verified": list(item.verified),
                "accepted": len(item.accepted),
                "accepted_nodes": list(item.accepted),
                "discarded": list(item.discarded),
                "emitted": list(item.emitted),
                "corrected": item.corrected,
                "text": item.text,
                "drafter": item.draft.drafter,
                "rows": item.rows,
                "seconds": {
                    "draft": item.seconds.draft,
                    "forward": item.seconds.forward,
                    "rest": item.seconds.rest,
                },
            }
            for item in self.rounds
        ]


def visible(text: str) -> str:
    """Text with spaces as · and whatever cannot be printed as an escape (a newline is \\n)."""
    return "".join(
        "·" if character == " " else character if character.isprintable() else _escaped(character) for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _own_kind(item: Round) -> str:
    """What the target's own token is: it replaces a wrong guess, follows the last guess, or nothing was verified."""
    if item.corrected:
        return "corrected"
    return "bonus" if item.verified else "no guess"


def _times(seconds: RoundSeconds) -> str:
    parts = (("draft", seconds.draft), ("forward", seconds.forward), ("rest", seconds.rest))
    listed = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in parts)
    return f"{1e3 * seconds.total:.2f} ms ({listed})"
