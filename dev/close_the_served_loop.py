"""Whether `wager plan` predicts a server's speed-ups from its `wager calibrate --url`: acceptance by its counters, and
tokens a second while all requests decode, at fixed depths and several loads, with one table at the end.

    python dev/close_the_served_loop.py PROMPTS CALIBRATION 0=URL DEPTH=URL... [--model MODEL] [--users 1,4,8]
        [--groups 4] [--tokens 96] [--json PATH]

Each URL is a server that always drafts to DEPTH, one of them plain (0), all of one model on one machine; they are asked
in turns. CALIBRATION is of `wager calibrate --url URL --json FILE` (of servers that take no depth: plain, then with
--append at one depth or more). The first group of each load warms up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parent))

from close_the_loop import say, wager

from wager.bench.load import LoadRun, OpenAIServer, ask_model, find_fields, run_load
from wager.config import DEFAULT_MODEL
from wager.prompts import Prompt, read_prompts, spread

TIMEOUT = 600.0


def decoding(run: LoadRun) -> tuple[float, float]:
    """Tokens and seconds while all requests decode: behind the last one's first chunk, before the first one's last."""
    if not all(answer.ok for answer in run.answers):
        raise SystemExit(next(answer.message for answer in run.answers if not answer.ok))
    begin = max(answer.arrivals[0] for answer in run.answers)
    end = min(answer.arrivals[-1] for answer in run.answers)
    inside = [sum(begin < at <= end for at in answer.arrivals) / len(answer.arrivals) for answer in run.answers]
    return sum(answer.tokens * share for answer, share in zip(run.answers, inside, strict=True)), max(0.0, end - begin)


def served(url: str, like: Prompt, tokens: int) -> OpenAIServer:
    """As it is asked: greedy answers of `tokens` that do not end early."""
    server = OpenAIServer.parse(url)
    fields = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    fields |= {"model": ask_model(server)["id"], "max_tokens": tokens}
    return find_fields(server.with_fields(**fields), like, timeout=TIMEOUT)


def metrics(server: OpenAIServer, page: Path) -> Path:
    """Its /metrics, saved."""
    with urlopen(f"{server.origin}/metrics", timeout=30) as answer:
        page.write_bytes(answer.read())
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="PROMPTS")
    parser.add_argument("calibration", type=Path)
    parser.add_argument("servers", nargs="+", metavar="DEPTH=URL")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--users", default="1,4,8")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    urls = {int(depth): url for depth, _, url in (each.partition("=") for each in args.servers)}
    prompts = spread(read_prompts(args.file), 48)
    servers = {depth: served(url, prompts[0], args.tokens) for depth, url in urls.items()}
    rows: list[dict[str, Any]] = []
    print("| requests | depth | predicted | measured | error |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        before, after, file = (Path(name) / each for each in ("before.txt", "after.txt", "acceptance.json"))
        for users in map(int, args.users.split(",")):
            sums, contexts = {depth: [0.0, 0.0] for depth in servers}, list[float]()
            for group in range(args.groups + 1):
                if group == 1:
                    for depth, server in servers.items():
                        metrics(server, before.with_suffix(f".{depth}"))
                for depth in list(servers)[:: 1 if group % 2 else -1]:
                    numbers = range(group * users, (group + 1) * users)
                    run = run_load(servers[depth], prompts, numbers=numbers, users=users, timeout=TIMEOUT)
                    for at, value in enumerate(decoding(run) if group else ()):
                        sums[depth][at] += value
                    contexts += [(answer.prompt_tokens or 0) + answer.tokens / 2 for answer in run.answers]
                say(f"{users} requests: group {group} of {args.groups}")
            if not all(seconds for _, seconds in sums.values()):
                raise SystemExit("Answers were over before all requests decoded: give more --tokens.")
            for depth in sorted(set(servers) - {0}):
                pages = before.with_suffix(f".{depth}"), metrics(servers[depth], after)
                wager("acceptance", pages[1], metrics=pages[0], drafter="ngram", output=file)
                given = {"hardware": args.calibration, "acceptance": file, "batch": users, "json": "-"}
                planned = wager("plan", model=args.model, context=round(mean(contexts)), **given)
                predicted = json.loads(planned)["points"][0]["depths"][depth]["speedup"]
                measured = sums[depth][0] / sums[depth][1] / (sums[0][0] / sums[0][1])
                rows.append({"requests": users, "depth": depth, "predicted": predicted, "measured": measured})
                error = predicted / measured - 1
                print(f"| {users} | {depth} | {predicted:.2f} | {measured:.2f} | {error:+.1%} |", flush=True)
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    print(f"\nErrors: {median(errors):.1%} (median), {errors[-1]:.1%} (largest).")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
