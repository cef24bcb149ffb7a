"""Several threads against one while other programs use the cores.

    python dev/bench_busy_machine.py [--model random:llama:tiny ...] [--neighbours 0,2,4,8] [--threads 1,2]
        [--against SRC]

Engines with each number of threads live in processes of their own and answer the same prompt in turns, one at a time,
beside as many neighbours that compute without end at the same priority. Stated for each number of neighbours: seconds
by those of the first engine in the same round, as the median over rounds and its quartiles, and the medians of the
seconds and of the processor seconds of an answer. --against takes the src folder of another build, with its extension,
whose engines take turns too. Token ids are asserted equal. State the machine's own load beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

SOURCE = Path(__file__).parents[1] / "src"
ENGINE = """
import json, sys, time
import wager
model, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = wager.LLM(model, drafter="none", threads=threads, prefix_cache=False, max_context=512)
for line in sys.stdin:
    begin, used = time.perf_counter(), time.process_time()
    ids = llm.generate(list(range(5, 25)), wager.SamplingParams(max_tokens=tokens, ignore_eos=True)).token_ids
    taken = time.perf_counter() - begin, time.process_time() - used
    print(json.dumps([*taken, list(ids)]), flush=True)
"""
NEIGHBOUR = "import os\nwhile os.getppid() == {parent}:\n    for _ in range(10**6): pass"


@dataclass(frozen=True)
class Answer:
    """Seconds of one answer, and processor seconds of all threads."""

    seconds: float
    used: float
    ids: tuple[int, ...]


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, source: Path, model: str, *, threads: int, tokens: int) -> None:
        command = [sys.executable, "-c", ENGINE, model, str(threads), str(tokens)]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> Answer:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, used, ids = json.loads(self.process.stdout.readline())
        return Answer(seconds, used, tuple(ids))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that compute without end."""
    code = NEIGHBOUR.format(parent=os.getpid())
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def measure(engines: dict[str, EngineProcess], rounds: int) -> dict[str, list[Answer]]:
    """Answers of each engine, which take turns, in the other order every second round."""
    answers: dict[str, list[Answer]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            answers[name].append(engines[name].answer())
        assert len({each[-1].ids for each in answers.values()}) == 1, "the number of threads changed a token"
    return answers


def report(count: int, answers: dict[str, list[Answer]]) -> None:
    first = next(iter(answers.values()))
    for name, each in answers.items():
        ratios = [a.seconds / b.seconds for a, b in zip(each, first, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        seconds, used = median(a.seconds for a in each), median(a.used for a in each)
        print(
            f"  {count} neighbours, {name:<12} ratio {median(ratios):6.3f} ({low:.3f} to {high:.3f})"
            f"  {seconds * 1e3:9.2f} ms  {used * 1e3:9.2f} ms of processors",
            flush=True,
        )


def numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", nargs="+", default=["random:llama:tiny", "SmolLM2-135M-Instruct"])
    options.add_argument("--neighbours", type=numbers, default=[0, 2, 4, 8])
    options.add_argument("--threads", type=numbers, default=[1, 2])
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--against", type=Path, help="the src folder of another build")
    chosen = options.parse_args()
    for model in chosen.model:
        sources = {"": SOURCE} | ({", other": chosen.against} if chosen.against else {})
        engines = {
            f"{threads} threads{which}": EngineProcess(source, model, threads=threads, tokens=chosen.tokens)
            for threads in chosen.threads
            for which, source in sources.items()
        }
        print(f"{model}, {chosen.tokens} tokens, {chosen.rounds} rounds, load {os.getloadavg()[0]:.1f}", flush=True)
        try:
            measure(engines, 2)
            for count in chosen.neighbours:
                with neighbours(count):
                    report(count, measure(engines, chosen.rounds))
        finally:
            for engine in engines.values():
                engine.close()


if __name__ == "__main__":
    main()
