"""Compares token ids of random requests with those of plain decoding, alone, until so many were compared:

    python dev/check_ids.py --ids 1000000 [--seed 1] [--models A,B,...]

Each round has a model, random requests (lengths, sampling, penalties, grammars, stops, choices, tenants, wishes of how
to draft) and their plain texts. Then engines with random drafters, depths, policies and sizes answer the same requests
in random order, with arrivals at random steps; some have a cache that is too small, some preempt all sequences again
and again, and in some requests are aborted or steps fail behind their pass. Exit code 1 if an id or a finish reason
differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from unit.every_drafter import every_drafter  # noqa: E402
from wager.config import EngineConfig  # noqa: E402
from wager.engine.outputs import OutputCollector  # noqa: E402
from wager.loading.load import LoadedEngine, LoadedTarget, load  # noqa: E402
from wager.types import (  # noqa: E402
    Grammar,
    Request,
    RequestSpeculation,
    SamplingParams,
    StepRecord,
)

MODELS = (
    "random:llama:tiny",
    "random:qwen3-moe:tiny",
    "random:deepseek:tiny",
    "random:gemma3:tiny",
    "random:qwen3-next:tiny",
    "random:granite-h:tiny",
    "SmolLM2-135M-Instruct",
)
KEPT_APART = ("slem", "tli", "prediction", "mtp", "mtp:tree")
"""Drafters that need another vocabulary, a prediction, or modules in the model; `wager prove` tries them."""
GRAMMARS = (Grammar("regex", "[a-z ]{5,40}"), Grammar("json_schema", '{"type": "object", "maxProperties": 2}'))
CONTEXT = 192


@dataclass
class Tally:
    ids: int = 0
    requests: int = 0
    preempted: int = 0
    accepted: int = 0
    differing: int = 0


class Failure(BaseException):
    """What is raised in a step, as a Ctrl-C would be."""


def random_requests(rng: random.Random, count: int, vocab: int, longest: int) -> list[Request]:
    shared = [rng.randrange(vocab) for _ in range(64)]
    wishes = (None, None, None, RequestSpeculation(depth=0), RequestSpeculation(), RequestSpeculation(depth=2))
    found = []
    for number in range(count):
        size = rng.choice((1, 5, 16, 17, 32, 40, 70))
        prompt = shared[: rng.choice((0, 16, 48, 64))] + [rng.randrange(min(vocab, 300)) for _ in range(size)]
        penalised = rng.random() < 0.25
        params = SamplingParams(
            max_tokens=rng.choice((1, 4, 20, longest, longest)),
            temperature=rng.choice((0.0, 0.0, 0.6, 1.0)),
            top_k=rng.choice((0, 0, 8)),
            top_p=rng.choice((1.0, 1.0, 0.9)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            seed=number if number % 2 else 2**64 - 1 - number,
            ignore_eos=rng.random() < 0.8,
            stop_token_ids=rng.sample(range(vocab), rng.choice((0, 0, vocab // 32))),
            stop=rng.choice(((), (), (), ("e", "th"))),
            logprobs=rng.choice((None, None, None, 2)),
            n=rng.choice((1, 1, 1, 3)),
            repetition_penalty=1.2 if penalised else 1.0,
            frequency_penalty=0.4 if penalised else 0.0,
            logit_bias={5: 3.0, 6: -100.0} if penalised else {},
            prediction=rng.choice(((), (), prompt)),
        )
        if rng.random() < 0.1:
            params = replace(params, grammar=rng.choice(GRAMMARS), ignore_eos=False, max_tokens=24)
        elif rng.random() < 0.2:
            params = replace(params, min_tokens=min(params.max_tokens, 12))
        tenant = rng.choice(("", "anna", "ben"))
        found.append(Request(f"r{number}", tuple(prompt), params, tenant=tenant, speculation=rng.choice(wishes)))
    return found


def fail_sometimes(engine: LoadedEngine, rng: random.Random, share: float) -> None:
    """That share of the steps raises before it is written, and as many after it."""
    accept = engine.runner.accept

    def fail(record: StepRecord | None = None) -> None:
        if rng.random() < share:
            raise Failure

    def failing(*given: Any) -> Any:
        fail()
        return accept(*given)

    engine.runner.accept, engine.on_step = failing, fail  # type: ignore[assignment, method-assign]
    engine.proposer = engine.proposer  # the stages are bound anew


def answers(
    engine: LoadedEngine,
    requests: Sequence[Request],
    rng: random.Random,
    *,
    at_once: int,
    preempting: float = 0.0,
    aborting: float = 0.0,
) -> tuple[dict[str, list[tuple[tuple[int, ...], str]]], int, int]:
    """By request the ids and finish reason of each choice; how many preemptions there were, and accepted guesses.
    `preempting` and `aborting` are shares of the steps; an aborted request is asked once more, under its own id."""
    collectors: dict[str, OutputCollector] = {}
    waiting, aborted = list(requests), set[str]()
    while waiting or engine.busy:
        while waiting and len(engine.open_requests) < at_once and (not engine.busy or rng.random() < 0.7):
            request = waiting.pop()
            collectors[request.id] = OutputCollector()
            collectors[request.id].expect(request)
            engine.add(request)
        try:
            deltas = engine.step()
        except Failure:
            continue
        for delta in deltas:
            if delta.finish_reason != "abort":
                collectors[delta.request_id].add(delta)
        if rng.random() < preempting:
            engine.preempt_all()
        if rng.random() < aborting and (open_ids := [name for name in engine.open_requests if name not in aborted]):
            left = rng.choice(open_ids)
            engine.abort(left)
            aborted.add(left)
            waiting.append(next(request for request in requests if request.id == left))
    engine.check()
    done = {name: each.completions() for name, each in collectors.items()}
    stats = [each.stats for found in done.values() for each in found]
    texts = {name: [(tuple(each.token_ids), each.finish_reason) for each in found] for name, found in done.items()}
    return texts, sum(each.preemptions for each in stats), sum(each.accepted for each in stats)


def random_config(rng: random.Random, base: EngineConfig, drafters: dict[str, str]) -> EngineConfig:
    names = [name for name in drafters if name not in KEPT_APART]
    chosen = ",".join(dict.fromkeys(drafters[name] for name in rng.sample(names, rng.choice((1, 1, 2)))))
    options: dict[str, Any] = {"drafter": chosen, "prefix_cache": rng.random() < 0.7}
    if "," not in chosen and rng.random() < 0.7:
        options |= {"depth": rng.choice((1, 3, 7)), "policy": rng.choice(("fixed", "threshold"))}
    return base.with_options(**options)


def one_round(model: str, seed: int, tally: Tally, *, longest: int, engines: int) -> None:
    rng = random.Random(seed)
    tight = rng.random() < 0.5
    base = EngineConfig.from_options(
        model=model,
        drafter="none",
        threads=rng.choice((1, 2, 5)),
        max_context=CONTEXT,
        prefix_cache=False,
        max_rows=rng.choice((24, 64, 256)),
        max_sequences=rng.choice((8, 16)),
        cache_tokens=rng.choice((208, 320, 512)) if tight else 4096,
        kv_dtype=rng.choice(("bf16", "bf16", "q8") if "deepseek" not in model else ("bf16",)),
        dtype=rng.choice(("auto", "bf16")) if model.startswith("Smol") else rng.choice(("bf16", "q4", "q8")),
    )
    plain = load(base)
    target: LoadedTarget = plain.target
    requests = random_requests(rng, 40, target.decoder.vocab, longest)
    undrafted = [replace(request, speculation=None) for request in requests]
    expected, _, _ = answers(plain, undrafted, rng, at_once=1)
    with tempfile.TemporaryDirectory() as folder:
        drafters = every_drafter(model, Path(folder))
        for _ in range(engines):
            config = random_config(rng, base, drafters)
            engine = load(config, target=target)
            order = rng.sample(requests, len(requests))
            shares = {"preempting": rng.choice((0.0, 0.05, 0.3)), "aborting": rng.choice((0.0, 0.02))}
            fail_sometimes(engine, rng, rng.choice((0.0, 0.02)))
            found, preempted, accepted = answers(engine, order, rng, at_once=rng.choice((1, 6, 24)), **shares)
            tally.preempted += preempted
            tally.accepted += accepted
            for name, choices in expected.items():
                tally.requests += 1
                tally.ids += sum(len(ids) for ids, _ in choices)
                if choices != found[name]:
                    tally.differing += 1
                    print(f"DIFFERS: seed {seed} {config} {shares} {name}", flush=True)
            engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    models, tally, seed, begun = options.models.split(","), Tally(), options.seed, time.monotonic()
    while tally.ids < options.ids:
        real = models[seed % len(models)].startswith("Smol")
        one_round(models[seed % len(models)], seed, tally, longest=48 if real else 100, engines=3 if real else 12)
        seed += 1
        print(f"{time.monotonic() - begun:.0f} s: seed {seed - 1}, {tally}", flush=True)
    return int(tally.differing > 0)


if __name__ == "__main__":
    sys.exit(main())
