"""Ask real servers for the same answers again and again: `python dev/check_same_text.py [--prompts FILE] [--limit 12]
[--rounds 2] [--drafters A,B ...]`.

The requests are those of tests/serve/same_requests.py, each with each prompt. The first server has no drafter and
answers each alone; all others, and that one again, answer them 32 at a time, in every variant of speculation, form and
client, in turn with a cache that is large enough and one that is not. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from serve.same_requests import (  # noqa: E402
    Answer,
    Case,
    Variant,
    cases,
    served_process,
    variants,
)
from wager.config import DEFAULT_MODEL  # noqa: E402
from wager.drafter_spec import parse_drafters  # noqa: E402
from wager.prompts import BUILTIN, read_prompts, spread  # noqa: E402

DRAFTERS = ("none", "auto", "store:tree:{store}", "ngram,suffix:tree,recycle,prediction", "layers:0-3,layers:tree:0-3")
STORE = ROOT / "src" / "wager" / "shipped" / "SmolLM2-135M-Instruct.store"
SMALL = "cache-tokens = 384\nmax-rows = 96\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of all servers")
    arguments = parser.parse_args()
    source = read_prompts(arguments.prompts or BUILTIN)
    asked = cases([prompt.text[:600] for prompt in spread(source, arguments.limit)], every=True)
    flags = ["--threads", "1", *arguments.flags]
    begun = time.monotonic()
    with served_process(arguments.model, *flags, "--drafter", "none") as server:
        expected = [server.ask(case, Variant(stream=True, stats=True)) for case in asked]
    tokens = sum(answer.usage[1] for answer in expected)
    print(f"{len(asked)} requests, {tokens} tokens, alone in {time.monotonic() - begun:.0f} s", flush=True)
    differing = 0
    for drafters in arguments.drafters:
        for small in (False, True):
            differing += check(drafters.format(store=STORE), asked, expected, arguments, small=small)
    return int(differing > 0)


def check(
    drafters: str, asked: Sequence[Case], expected: Sequence[Answer], arguments: argparse.Namespace, *, small: bool
) -> int:
    """One server; the number of answers that differ."""
    names = [spec.name for spec in parse_drafters(drafters)] if drafters != "auto" else ["store"]
    flags = ["--threads", "1", *arguments.flags, "--drafter", drafters]
    begun, count, found, drafted = time.monotonic(), 0, [], 0
    with tempfile.TemporaryDirectory() as folder:
        if small:
            config = Path(folder) / "small.toml"
            config.write_text(SMALL)
            flags += ["--config", str(config)]
        with served_process(arguments.model, *flags) as server:
            choices = variants(names, seed=7 + small)
            for _ in range(arguments.rounds):
                work = list(zip(asked, choices, strict=False))
                told, answers = server.differences(expected, work)
                found += told
                count += len(answers)
                drafted += sum(choice.drafted for answer in answers for choice in answer.choices)
            accepted = server.metric("spec_decode_num_accepted_tokens_total")
            preempted = server.metric("num_preemptions_total")
    print(
        f"{drafters}{', small cache' if small else ''}: {count} requests, {accepted:.0f} guesses accepted, "
        f"{preempted:.0f} preemptions, {len(found)} differ, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    for line in found[:10]:
        print("  ", line)
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
