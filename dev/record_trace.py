"""Record a trace for `wager replay`: what drafters would draft at every position of plain answers.

    python dev/record_trace.py PROMPTS OUT [--drafter NAME[:ARG]]... [--limit N] [--max-tokens N] [--model MODEL]

Answers come from an engine without a drafter, greedy; then each drafter drafts from every position, as deep as it
can, and its draft is compared with the rest of the answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from wager.bench.workload import read_prompts, spread
from wager.build.load import load
from wager.cli.bench import to_requests
from wager.cli.flags import Framing
from wager.config import DEFAULT_MODEL, EngineConfig
from wager.draft.base import Drafter
from wager.types import Completion, DraftRequest, Request, SamplingParams


def drafts_along(drafter: Drafter, request: Request, answer: tuple[int, ...]) -> dict[str, Any]:
    """`right` and `scores` of one drafter along one answer, as wager.economics.simulation.traces reads them."""
    drafter.begin(request.id, request.prompt, request.params)
    matching, scores = [], []
    for at in range(len(answer)):
        position = len(request.prompt) + at
        [draft] = drafter.propose([DraftRequest(request.id, position, drafter.max_depth, request.params, seed=0)])
        ahead = answer[at:]
        run = 0
        while run < min(len(draft.tokens), len(ahead)) and draft.tokens[run] == ahead[run]:
            run += 1
        matching.append(run)
        scores.append([round(score, 4) for score in draft.scores])
        drafter.accept(request.id, answer[at : at + 1])
    drafter.end(request.id)
    return {"right": matching, "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", action="append")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args()
    plain = load(EngineConfig.from_options(model=args.model, drafter="none"))
    prompts = spread(read_prompts(args.prompts), args.limit)
    framing = Framing(raw=False, system=None)
    requests = to_requests(prompts, plain.tokenizer, framing=framing, params=SamplingParams(args.max_tokens))
    answers: list[Completion] = plain.generate(requests, concurrency=8)
    drafters = {
        name: load(
            EngineConfig.from_options(model=args.model, drafter=name, depth=1), target=plain.target
        ).proposer.drafters.values()
        for name in args.drafter or ["ngram"]
    }
    with args.out.open("w", encoding="utf-8") as file:
        for prompt, request, answer in zip(prompts, requests, answers, strict=True):
            row = {
                "id": prompt.id,
                "category": prompt.family,
                "prompt_tokens": len(request.prompt),
                "tokens": len(answer.token_ids),
                "drafters": {
                    each.name: drafts_along(each, request, answer.token_ids)
                    for found in drafters.values()
                    for each in found
                },
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    sys.stderr.write(f"{len(answers)} answers in {args.out}\n")


if __name__ == "__main__":
    main()
