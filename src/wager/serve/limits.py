"""What the server allows: its options, the queue in front of the engine, and the size and time of bodies."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import ClientDisconnect, Request

from wager.errors import UsageError
from wager.inputs import read_text, shown
from wager.receipts import SigningKey
from wager.serve.errors import ApiError, field_error

# ---- options ---------------------------------------------------------------------------------------------------------


_SHORTEST_KEY = 16
_TENANT_FIELD = re.compile(r"user|safety_identifier|metadata\.[\w.-]{1,64}")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the server allows.

    `model_names` are those by which clients call the model; answers to requests without one have the
    first. `max_waiting`: requests that may wait for their first step; more are
    refused with 429. `request_timeout`: seconds from arrival after which a request ends. `max_body`: bytes of a body;
    `max_bodies`: of all that are being read; `body_timeout`: seconds in which one must arrive. `drain_timeout`: seconds
    that running requests get after SIGTERM.
    `strict_fields`: fields that are not known are refused, not left out.
    `cors`: origins whose pages may call, "*" for all. `default_temperature`: of requests that name none; OpenAI's is 1.

    What is learned and cached of a key's requests serves that key alone, unless `share_between_keys`. `operator_keys`
    are keys that may also read the figures of all. `show_rejected`: answers show rejected guesses also of drafters that
    guess from other requests. `tenant_by`: the field of a body, such as user or metadata.team, by which the requests of
    one key are told apart: each of its values is a tenant. `receipt_key` signs the receipts of answers.
    """

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()
    share_between_keys: bool = False
    show_rejected: bool = False
    tenant_by: str = ""
    max_waiting: int = 256
    request_timeout: float = 600.0
    max_body: int = 4 << 20
    max_bodies: int = 64 << 20
    body_timeout: float = 10.0
    drain_timeout: float = 30.0
    cors: tuple[str, ...] = ()
    default_temperature: float = 1.0
    strict_fields: bool = False
    receipt_key: SigningKey | None = None

    def __post_init__(self) -> None:
        """UsageError for an origin that no browser sends, and for a field that no body has."""
        if self.tenant_by and not _TENANT_FIELD.fullmatch(self.tenant_by):
            raise UsageError(
                f"Requests cannot be told apart by {shown(self.tenant_by)}.",
                "Give user, safety_identifier, or a name below metadata, such as metadata.team.",
            )
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"{shown(origin)} is not an origin that pages have.",
                    "Give its scheme, host and port alone, such as https://example.org, or * for all.",
                )

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def has_tenants(self) -> bool:
        """Whether callers are told apart: then none of them may take all there is."""
        return len({*self.api_keys, *self.operator_keys}) > 1 and not self.share_between_keys

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


# ---- turns -----------------------------------------------------------------------------------------------------------


class Turns:
    """One caller at a time. Tenants whose callers wait take turns, however many callers each has."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by tenant, the next one first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a turn, which lasts until the block is left."""
        if self._taken:
            given = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(given)
            try:
                await given
            except asyncio.CancelledError:
                if not given.cancelled():  # it was given meanwhile
                    self._give()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        """To the next one that still waits."""
        self._taken = False
        while self._waiting and not self._taken:
            tenant, waiting = self._waiting.popitem(last=False)
            while waiting and not self._taken:
                given = waiting.popleft()
                if not given.done():
                    given.set_result(None)
                    self._taken = True
            if waiting:
                self._waiting[tenant] = waiting


# ---- admission -------------------------------------------------------------------------------------------------------


_RECENT = 64
"""Ended requests whose rate tells when a place will be free."""


class Admission:
    """Counts the sequences that were let in. `running` may decode at once; beyond them `max_waiting` may wait, and
    whoever comes then is refused with 429 and the seconds after which a place is likely to be free."""

    def __init__(self, *, running: int, max_waiting: int) -> None:
        self._most = running + max_waiting
        self._ended: deque[float] = deque(maxlen=_RECENT)
        self.open = 0
        """Sequences that were let in and have not ended."""
        self.draining = False
        """Whether nobody is let in any more."""

    @contextmanager
    def place(self, sequences: int) -> Iterator[None]:
        """Room for `sequences` while the block lasts. ApiError 400, 429 or 503 if there is none."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", "Try another one.", retry_after=30)
        if sequences > self._most:
            raise field_error("n", f"The request has {sequences} choices.", f"Ask for at most {self._most}.")
        if self.open + sequences > self._most:
            wait = self.retry_after(self.open + sequences - self._most)
            raise ApiError(
                429, f"{self.open} requests wait or run already.", f"Try again in {wait} s.", retry_after=wait
            )
        self.open += sequences
        try:
            yield
        finally:
            self.open -= sequences
            self._ended.extend([time.monotonic()] * min(sequences, _RECENT))

    def retry_after(self, places: int) -> int:
        """Whole seconds, 1 to 60, in which `places` sequences end at the recent rate."""
        if len(self._ended) < 2:
            return 1
        spent = time.monotonic() - self._ended[0]
        return max(1, min(60, round(places * spent / len(self._ended))))


# ---- bodies ----------------------------------------------------------------------------------------------------------


class BodyLimits:
    """Reads bodies within the limits of `options`. `held`: bytes of those that are read or parsed. A tenant that holds
    some may hold more as long as it leaves as much to others: it alone gets half, and there is always a rest."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._most = max(options.max_bodies, options.max_body)
        self.held = 0
        self._held_by: Counter[str] = Counter()  # tenant

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body; its bytes count until the block is left. ApiError 413 if it is too long, 408 if it is too slow, 415
        if it says that it is not JSON, or compressed, 503 if all bodies together are too many bytes."""
        kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(
                415, f"The body is said to be {kind[:80]!r}.", "Send the header Content-Type: application/json."
            )
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(415, f"The body is said to be coded: {coding[:80]!r}.", "Send it without Content-Encoding.")
        length = request.headers.get("content-length", "")
        tenant = request.state.tenant
        self._check(int(length) if length.isdigit() else 0, tenant)
        raw = bytearray()
        try:
            await self._receive(request, raw)
            yield bytes(raw)
        finally:
            self._hold(-len(raw), tenant)

    async def _receive(self, request: Request, raw: bytearray) -> None:
        seconds = self._options.body_timeout
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    self._check(len(part), request.state.tenant, before=len(raw))
                    self._hold(len(part), request.state.tenant)
                    raw += part
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {seconds:g} seconds.", "Send it at once.") from None
        except ClientDisconnect:
            raise ApiError(400, "The connection ended within the body.") from None

    def _hold(self, more: int, tenant: str) -> None:
        self.held += more
        self._held_by[tenant] += more
        if not self._held_by[tenant]:
            del self._held_by[tenant]

    def _check(self, more: int, tenant: str, *, before: int = 0) -> None:
        """ApiError unless a body of which `before` bytes have come may have `more`."""
        options = self._options
        if before + more > options.max_body:
            raise ApiError(413, f"The body is longer than {options.max_body} bytes.", "Send a shorter prompt.")
        left, own = self._most - self.held - more, self._held_by[tenant]
        if left < 0 or (options.has_tenants and own > before and own + more > left):
            raise ApiError(
                503, f"Bodies of {self.held} bytes are being read already.", "Try again in 1 s.", retry_after=1
            )
