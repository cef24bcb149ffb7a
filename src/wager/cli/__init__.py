"""The command line: one file a verb, imported when it is called. Importing this package imports nothing else, so that
a signal finds its handlers soon after the start.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted,
143 terminated (SIGTERM), 129 hung up (SIGHUP).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `arguments` defaults to the process's own."""

    def command() -> int:
        from wager.cli.verbs import run

        return run(arguments)

    try:
        from wager.cli import process
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130
    return process.ends_in_order(command)
