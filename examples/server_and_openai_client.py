"""Starts `wager serve` and talks to it with OpenAI's own client, once with and once without speculation.

    pip install openai
    python examples/server_and_openai_client.py [MODEL]

The same request with the same seed gets the same text either way; the field `speculation` is wager's.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from openai import OpenAI

MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct"


@contextmanager
def server() -> Iterator[str]:
    """The address of a server on a free port; it is ended with SIGTERM, and finishes what it has begun."""
    command = [sys.executable, "-m", "wager.cli", "serve", "--model", MODEL, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next((line for line in process.stderr if "serving" in line), None)
            if line is None:
                raise SystemExit("wager serve ended before it was ready.")
            yield line.split()[-1]
        finally:
            process.terminate()


def main() -> None:
    with server() as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        for fields in ({}, {"speculation": "off"}):
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Why is the sky blue?"}],
                max_tokens=48,
                temperature=0.8,
                seed=7,
                stream=True,
                extra_body=fields,
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            print(f"speculation {fields.get('speculation', 'on')}: {text!r}")


if __name__ == "__main__":
    main()
