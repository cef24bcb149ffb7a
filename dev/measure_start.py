"""How long a server takes from its command to its first answer: `python dev/measure_start.py [--runs 5] [FLAGS]`.

Each run starts `wager serve` anew, waits until it says that it serves, and asks for one chat of eight tokens; the first
start, which may pack weights and measure steps, is not counted. FLAGS are those of `wager serve`, such as
--drafter none. Medians of the wall-clock seconds until it serves and until the answer is there, and of the processor
time that the process has taken by then, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serve.serving import server_process

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    arguments, flags = parser.parse_known_args()
    rows = [start_once(flags) for _ in range(arguments.runs + 1)][1:]
    print("wager serve", *flags)
    for index, name in enumerate(("serving", "first answer", "user CPU", "system CPU")):
        values = sorted(row[index] for row in rows)
        print(f"{name:<14}{median(values):.2f} s   ({', '.join(f'{value:.2f}' for value in values)})")
    return 0


def start_once(flags: Sequence[str]) -> tuple[float, float, float, float]:
    """Seconds until the server serves and until its first answer; its user and system seconds then."""
    begun = time.perf_counter()
    with server_process(*flags) as server:
        serving = time.perf_counter() - begun
        body = json.dumps({"messages": MESSAGES, "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{server.url}/v1/chat/completions", body)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
        answered = time.perf_counter() - begun
        user, system = cpu_seconds(server.process.pid)
    return serving, answered, user, system


def cpu_seconds(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


if __name__ == "__main__":
    sys.exit(main())
