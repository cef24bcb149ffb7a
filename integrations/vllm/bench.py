"""vLLM plain, with its ngram, with its suffix decoding, and with wager, on the same prompts in turns; with --head vLLM
plain, with that EAGLE-3 head at depth 1, 3 and 5, and with wager's scheduler over it.

    python integrations/vllm/bench.py --model MODEL [--head HEAD] [--streams 1,4,16] [--rounds 3] [--json FILE]

Run by the Python of vLLM's environment. Each way is an engine in a process of its own, that stays while the others run;
they take turns on every load, so that a change of the machine meets them all. Between two runs an engine forgets the
texts that it has seen: no prompt is asked twice of one that remembers its answer. Beside other programs
--processor-time has wager decide by the processor's time instead of seconds, as on a machine of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

PROMPTS = Path(__file__).parents[2] / "src/wager/prompts.jsonl"
DEPTH = 8
HEAD_DEPTHS = (1, 3, 5)
_CACHE = 24 << 20  # bytes of keys and values for each request that runs: a thousand positions of SmolLM2-135M
WAYS: Mapping[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": DEPTH,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": DEPTH},
    "wager": {"method": "custom_class", "model": "wager_vllm.Proposer", "num_speculative_tokens": DEPTH},
}
"""The speculative configuration of each."""
HEAD_WAYS = ("plain", *(f"depth {depth}" for depth in HEAD_DEPTHS), "scheduler")


def configuration(way: str, head: str) -> dict[str, Any]:
    """Arguments of LLM."""
    if way in WAYS:
        return {"speculative_config": WAYS[way]}
    depth = max(HEAD_DEPTHS) if way == "scheduler" else int(way.removeprefix("depth "))
    own = {"scheduler_cls": "wager_vllm.Scheduler"} if way == "scheduler" else {}
    return {"speculative_config": {"method": "eagle3", "model": head, "num_speculative_tokens": depth}, **own}


# ---- one engine, in its process -------------------------------------------------------------------------------------


class Served:
    """An engine in this process, stepped by hand."""

    def __init__(self, way: str, model: str, *, head: str, most: int) -> None:
        from vllm import LLM

        self.way = way
        self.llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=most,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=max(4, most) * _CACHE,
            disable_log_stats=False,
            **configuration(way, head),
        )
        self.engine = self.llm.llm_engine
        self.tokenizer = self.llm.get_tokenizer()
        self.runs = 0

    def forget(self) -> None:
        """The texts of earlier runs."""
        worker = self.engine.model_executor.driver_worker
        drafter = getattr(getattr(worker, "worker", worker).model_runner, "drafter", None)
        if self.way == "suffix":
            cache = drafter.suffix_cache
            for request in list(cache.cached_requests):
                cache.evict_cached_response(request)
        elif self.way == "wager":
            drafter.forget()

    def counters(self) -> dict[str, int]:
        found = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value"):
                found[metric.name.removeprefix("vllm:spec_decode_num_")] = int(metric.value)
        return found

    def run(self, prompts: Sequence[str], *, streams: int, tokens: int) -> dict[str, Any]:
        """Answer all prompts, `streams` at a time: seconds, steps, tokens, counters and texts."""
        from vllm import SamplingParams

        self.forget()
        self.runs += 1
        before, waiting, texts = self.counters(), list(enumerate(prompts)), dict[int, list[int]]()
        running = steps = 0
        begun, processor = time.perf_counter(), time.process_time()
        while waiting or running:
            while waiting and running < streams:
                number, prompt = waiting.pop(0)
                messages = [{"role": "user", "content": prompt}]
                ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                params = SamplingParams(temperature=0.0, max_tokens=tokens)
                self.engine.add_request(f"{self.runs}-{number}", {"prompt_token_ids": list(ids)}, params)
                running += 1
            for output in self.engine.step():
                if output.finished:
                    texts[int(output.request_id.partition("-")[2])] = list(output.outputs[0].token_ids)
                    running -= 1
            steps += 1
        seconds, processor = time.perf_counter() - begun, time.process_time() - processor
        counted = {name: value - before.get(name, 0) for name, value in self.counters().items()}
        made = sum(len(text) for text in texts.values())
        times = {"seconds": seconds, "processor": processor}
        return {**times, "steps": steps, "tokens": made, "counters": counted, "texts": texts}


def use_processor_time() -> None:
    from wager_vllm.proposer import Proposer
    from wager_vllm.scheduler import AdaptiveDepth

    AdaptiveDepth.clock = staticmethod(time.process_time)
    Proposer.__init__.__kwdefaults__["clock"] = time.process_time


def serve(way: str, model: str, *, head: str, most: int, processor_time: bool) -> None:
    """Answer the runs that the standard input asks for, a line each."""
    out, sys.stdout = sys.stdout, sys.stderr
    if processor_time:
        use_processor_time()
    served = Served(way, model, head=head, most=most)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(served.run(**json.loads(line))), file=out, flush=True)


# ---- all of them ----------------------------------------------------------------------------------------------------


class Engine:
    """The process of one way."""

    def __init__(self, way: str, model: str, *, head: str, most: int, processor_time: bool, log: Path) -> None:
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
        }
        command = [sys.executable, __file__, "--serve", way, "--model", model, "--streams", str(most), "--head", head]
        command += ["--processor-time"] * processor_time
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self.log = log
        self._line()

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            sys.exit(f"The engine ended; its last words are in {self.log}.")
        return line

    def run(self, **load: Any) -> dict[str, Any]:
        if self.process.stdin is not None:
            print(json.dumps(load), file=self.process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._line())
        return found


def table(results: Mapping[int, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Medians over the rounds. Speed is that of plain vLLM in the same round, divided; then the same by the processor's
    time of the engine's process, which other programs disturb less."""
    lines = ["| streams | way | speed | by processor time | tok/s | steps | drafted | accepted | texts changed |"]
    lines.append("|---" * 9 + "|")
    for streams, ways in results.items():
        for way, runs in ways.items():
            plain = ways.get("plain", runs)
            pairs = list(zip(plain, runs, strict=True))
            speed, by_processor = (
                median(a[clock] / a["tokens"] * b["tokens"] / b[clock] for a, b in pairs)
                for clock in ("seconds", "processor")
            )
            rate = median(run["tokens"] / run["seconds"] for run in runs)
            changed = median(sum(b["texts"][at] != text for at, text in a["texts"].items()) for a, b in pairs)
            steps, drafted, accepted = (
                median(run["steps"] if name == "steps" else run["counters"].get(name, 0) for run in runs)
                for name in ("steps", "draft_tokens", "accepted_tokens")
            )
            figures = [f"{each:.0f}" for each in (rate, steps, drafted, accepted, changed)]
            lines.append(f"| {streams} | {way} | {speed:.2f} | {by_processor:.2f} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--head", default="")
    parser.add_argument("--ways")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    loads = [int(word) for word in given.streams.split(",")]
    if given.serve:
        serve(given.serve, given.model, head=given.head, most=max(loads), processor_time=given.processor_time)
        return
    asked = given.ways.split(",") if given.ways else HEAD_WAYS if given.head else WAYS
    ways = [way for way in asked if way != "suffix" or find_spec("arctic_inference")]
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    engines = {}
    for way in ways:
        log = given.logs / f"bench-vllm-{way.replace(' ', '-')}.log"
        engines[way] = Engine(
            way, given.model, head=given.head, most=max(loads), processor_time=given.processor_time, log=log
        )
    for engine in engines.values():  # what compiles at its first use
        engine.run(prompts=prompts[:2], streams=2, tokens=32)
    results: dict[int, dict[str, list[dict[str, Any]]]] = {load: {way: [] for way in ways} for load in loads}
    for number in range(given.rounds):
        for load in loads:
            for way in (*ways[number % len(ways) :], *ways[: number % len(ways)]):
                results[load][way].append(engines[way].run(prompts=prompts, streams=load, tokens=given.tokens))
        print(f"round {number + 1}\n{table(results)}\n", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results))
    for engine in engines.values():
        engine.process.kill()


if __name__ == "__main__":
    main()
