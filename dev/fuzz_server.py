"""Searches for requests that `wager serve` answers with 5xx, or otherwise than tests/serve/answers.py says.

    python dev/fuzz_server.py --minutes 10 --seed 7

Bodies are those of tests/serve/test_fuzz_server.py, which runs a fixed few of them. What is found is shrunk and shown.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serve.api_bodies import Call, calls, check, send
from serve.serving import eventually, served

AT_ONCE = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end, count = time.monotonic() + 60 * options.minutes, 0
    with served("--max-context", "320", "--drafter", "ngram") as server, server.client() as http:

        @settings(max_examples=AT_ONCE, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(call=calls())
        def search(call: Call) -> None:
            nonlocal count
            count += 1
            check(call.path, send(http, call))

        number, begin = options.seed, server.resident()
        while time.monotonic() < end:
            seed(number)(search)()
            number += 1
            print(f"{count} requests, {server.resident() / 2**20:.0f} MiB ({begin / 2**20:.0f} at first)", flush=True)
        eventually(server.is_idle, "something runs after the last answer")


if __name__ == "__main__":
    main()
