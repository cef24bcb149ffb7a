"""Options of the server, checked when they are given."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from wager.errors import UsageError
from wager.inputs import read_text, shown

_SHORTEST_KEY = 16
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the server allows.

    `model_name` is how clients call the model. `max_waiting`: requests that may wait for their first step; more are
    refused with 429. `request_timeout`: seconds from arrival after which a request ends. `max_body`: bytes of a body;
    `max_bodies`: of all that are being read; `body_timeout`: seconds in which one must arrive. `drain_timeout`: seconds
    that running requests get after SIGTERM.
    `cors`: origins whose pages may call, "*" for all. `default_temperature`: of requests that name none; OpenAI's is 1.

    What is learned and cached of a key's requests serves that key alone, unless `share_between_keys`. `operator_keys`
    are keys that may also read the figures of all. `show_rejected`: answers show rejected guesses also of drafters that
    guess from other requests.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()
    share_between_keys: bool = False
    show_rejected: bool = False
    max_waiting: int = 256
    request_timeout: float = 600.0
    max_body: int = 4 << 20
    max_bodies: int = 64 << 20
    body_timeout: float = 10.0
    drain_timeout: float = 30.0
    cors: tuple[str, ...] = ()
    default_temperature: float = 1.0

    def __post_init__(self) -> None:
        """UsageError for an origin that no browser sends."""
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"{shown(origin)} is not an origin that pages have.",
                    "Give its scheme, host and port alone, such as https://example.org, or * for all.",
                )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Keys from a file, one a line; empty lines and those that begin with # are left out. UsageError names the line of
    a key that is too short to be safe, or not printable ASCII without blanks."""
    keys = []
    for number, line in enumerate(read_text(path, "file of API keys", "Give one key a line.").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < _SHORTEST_KEY or not all("!" <= letter <= "~" for letter in key):
            raise UsageError(
                f"Line {number} of {path} is not an API key.",
                f"A key is {_SHORTEST_KEY} or more printable ASCII characters without blanks.",
            )
        keys.append(key)
    if not keys:
        raise UsageError(f"{shown(str(path))} has no API key.", "Write one key a line.")
    return tuple(keys)
