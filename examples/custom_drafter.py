"""A drafter of one's own: after every token it guesses what followed the same token the last time.

    python examples/custom_drafter.py [MODEL]

The engine answers plainly and with the drafter on one copy of the weights, and the token ids are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from wager import EngineConfig, Request, SamplingParams
from wager.draft.base import Drafter
from wager.loading.load import load
from wager.types import Draft, DraftRequest

MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct"
PROMPT = "one two three one two three one two three one two"


class LastFollower(Drafter):
    name, default_depth, max_depth = "last-follower", 4, 8

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.followers: dict[str, dict[int, int]] = {}

    def begin(self, seq_id: str, tokens: Sequence[int], params: SamplingParams, *, tenant: str = "") -> None:
        self.followers[seq_id], self.last[seq_id] = {}, tokens[0]
        self.accept(seq_id, tokens[1:])

    def accept(self, seq_id: str, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.followers[seq_id][self.last[seq_id]] = token
            self.last[seq_id] = token

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft.chain(each.seq_id, self._guesses(each), drafter=self.name) for each in requests]

    def _guesses(self, request: DraftRequest) -> list[int]:
        guesses, followers = [self.last[request.seq_id]], self.followers[request.seq_id]
        while len(guesses) <= request.depth and guesses[-1] in followers:
            guesses.append(followers[guesses[-1]])
        return guesses[1:]

    def end(self, seq_id: str) -> None:
        self.followers.pop(seq_id, None)


def main() -> None:
    plain = load(EngineConfig.from_options(model=MODEL, drafter="none"))
    request = Request("0", tuple(plain.tokenizer.encode(PROMPT)), SamplingParams(max_tokens=48))
    drafting = load(EngineConfig.from_options(model=MODEL), target=plain.target, drafter=LastFollower())
    [expected], [answer] = plain.generate([request]), drafting.generate([request])
    print(f"{answer.stats.accepted} of {answer.stats.drafted} guesses accepted in {answer.stats.rounds} passes")
    print("same token ids:", answer.token_ids == expected.token_ids)


if __name__ == "__main__":
    main()
