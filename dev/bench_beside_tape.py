"""What a step takes beside the kernels: microseconds outside `Tape.run`, by stage, with the tape really running.

    python dev/bench_beside_tape.py [MODEL] [--prompts FILE] [--sequences 1,8,32] [--drafters none,ngram,adversary]
                                    [--steps 192] [--max-tokens 128] [--sampled] [--json PATH]

So many sequences decode at a time, and where one ends the next prompt comes, as for `LLM.generate`; the policy is the
default one of the drafter (`adversary` is always wrong). Counted are steps without prompts, by all sequences, that
another such step follows. `beside` is the time from the end of one run of the tape to the begin of the next, so it has
everything: the stages, what lies between them, and the caller's loop. `pack` is what the forward stage takes beyond the
tape; `rest` what lies in no stage. A number is the mean over 32 counted steps, since planning and learning are done in
some of them only; printed are the median of these means and, in brackets, the least. The first 64 steps only warm up.

To compare with an older version, run this file by an environment where that one is installed: an editable installation
redirects imports, whatever PYTHONPATH says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import NamedTuple

import wager
from wager.engine.outputs import OutputCollector
from wager.engine.threads import SharedEngine
from wager.loading.load import LoadedEngine, load
from wager.prompts import read_prompts
from wager.testing import AdversaryDrafter
from wager.types import FORWARD_STAGE, Request, SamplingParams

ENGINES = {"none": {"drafter": "none"}, "ngram": {"drafter": "ngram"}, "auto": {"drafter": "auto"}, "adversary": {}}
STAGES = ("schedule", "policy", "draft", "pack", "accept", "commit", "observe", "rest")
BLOCK = 32
"""Steps over which a mean is taken: the greatest interval between plans."""
WARM = 256
"""Steps before the first one that counts: the policy leaves nothing out in its first 64."""
ROOT = Path(__file__).parents[1]


def own_prompts() -> list[str]:
    """Paragraphs of this repository's documents, to be summarised."""
    parts = [part for path in sorted((ROOT / "docs").glob("*.md")) for part in path.read_text().split("\n\n")]
    return ["Summarise this text:\n\n" + part for part in parts if 150 < len(part) < 400 and "|" not in part]


class TapeRun(NamedTuple):
    begin: float
    end: float
    rows: int
    sequences: int
    logits_rows: int


class Measured:
    """Steps of one engine that serves `count` sequences at a time; `taken` are their microseconds by stage."""

    def __init__(self, engine: LoadedEngine, prompts: Iterator[tuple[int, ...]], params: SamplingParams) -> None:
        self._shared, self._prompts, self._params = SharedEngine(engine), prompts, params
        self._tape, self._trace = engine.target.decoder._tape, engine._trace
        self._runs: list[tuple[float, float, int, int, int]] = []  # as TapeRun has them, made when the steps are over
        self._seconds: list[Mapping[str, float]] = []  # by stage, of each step
        self.taken: list[dict[str, float]] = []
        self.texts: dict[str, list[int]] = {}

    def measure(self, count: int, steps: int) -> None:
        run, take_into, running, number = self._tape.run, self._trace.take_into, deque[str](), 0
        clock = time.perf_counter

        def timed(*, rows: int, sequences: int, logits_rows: int) -> None:
            begin = clock()
            run(rows=rows, sequences=sequences, logits_rows=logits_rows)
            self._runs.append((begin, clock(), rows, sequences, logits_rows))

        def taken(seconds: dict[str, float]) -> None:
            take_into(seconds)
            self._seconds.append(seconds)

        self._tape.run, self._trace.take_into = timed, taken
        try:
            while len(self.taken) < steps:
                collector = OutputCollector()
                for _ in range(4 * count):  # several rounds of sequences, so that one may follow another
                    request = Request(f"r{number}", next(self._prompts), self._params)
                    number += 1
                    collector.expect(request)
                    running.append(request.id)
                    self._shared.add(request, collector.add)
                while self._shared.advance(running):
                    while running and not self._shared.runs(running[0]):
                        running.popleft()
                for done in collector.completions():
                    self.texts[done.request_id] = list(done.token_ids)
                self._count(count)
        finally:
            del self._tape.run
            self._trace.take_into = take_into

    def _count(self, count: int) -> None:
        runs = [TapeRun(*run) for run in self._runs]
        for run, later, by_stage in zip(runs, runs[1:], self._seconds, strict=False):
            # without prompts every row has logits
            if all(each.rows == each.logits_rows and each.sequences == count for each in (run, later)):
                taken = dict.fromkeys(STAGES, 0.0)
                for stage, seconds in by_stage.items():
                    taken["pack" if stage == FORWARD_STAGE else stage] += seconds
                beside, tape = later.begin - run.end, run.end - run.begin
                taken["pack"] -= tape
                taken["rest"] = beside - sum(taken.values())
                taken |= {"beside": beside, "tape": tape}
                self.taken.append({name: 1e6 * value for name, value in taken.items()} | {"rows": run.rows})
        self._runs.clear()
        self._seconds.clear()


def blocks_of(taken: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Means over blocks of steps."""
    starts = range(0, len(taken) - BLOCK + 1, BLOCK)
    return [{name: sum(step[name] for step in taken[at : at + BLOCK]) / BLOCK for name in taken[0]} for at in starts]


def line(name: str, count: int, blocks: Sequence[dict[str, float]]) -> str:
    def cell(key: str) -> str:
        values = [block[key] for block in blocks]
        return f"{median(values):4.0f} ({min(values):4.0f})"

    step = median(block["beside"] + block["tape"] for block in blocks)
    tape, beside, policy = (median(block[key] for block in blocks) for key in ("tape", "beside", "policy"))
    cells = "  ".join(cell(stage) for stage in (*STAGES, "beside"))
    rows = median(block["rows"] for block in blocks)
    return f"{name:>9} {count:3} {rows:5.1f} {tape:6.0f}  {cells}  {beside / step:6.1%} {policy / step:6.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, help="a prompt file  [default: this repository's documents]")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--drafters", default=",".join(ENGINES))
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8 instead of greedy")
    parser.add_argument("--json", type=Path, help="write the token ids, and the means of the blocks")
    args = parser.parse_args()
    texts = [prompt.text for prompt in read_prompts(args.prompts)] if args.prompts else own_prompts()
    params = SamplingParams(args.max_tokens, seed=0, temperature=0.8 if args.sampled else 0.0)
    titles = "  ".join(f"{stage:>11}" for stage in (*STAGES, "beside"))
    results = {}
    for count in map(int, args.sequences.split(",")):
        base = {"model": args.model, "max_context": 2048, "cache_tokens": 65536, "max_sequences": count}
        plain = load(wager.EngineConfig.from_options(**base, prefix_cache=False, drafter="none"))
        print(f"{plain.kernels.name}; microseconds a step: median of means over {BLOCK} steps (least)")
        print(f"{'drafter':>9} {'seq':>3} {'rows':>5} {'tape':>6}  {titles}   share policy")
        for name in args.drafters.split(","):
            config = wager.EngineConfig.from_options(**base, prefix_cache=False, **ENGINES[name])
            wrong = AdversaryDrafter(plain.spec.vocab) if name == "adversary" else None
            engine = plain if name == "none" else load(config, target=plain.target, drafter=wrong)
            chat = [engine.tokenizer.chat_parts([{"role": "user", "content": text}]) for text in texts]
            prompts = cycle([tuple(engine.tokenizer.encode_parts(parts)) for parts in chat])
            measured = Measured(engine, prompts, params)
            measured.measure(count, WARM + args.steps)
            blocks = blocks_of(measured.taken[WARM:])
            print(line(name, count, blocks), flush=True)
            results[f"{name} {count}"] = {"blocks": blocks, "texts": measured.texts}
    if args.json:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
