"""Around every request: its id, the API key, and its line in the log. Plain ASGI, so that streams pass untouched."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wager.serve.errors import ApiError, error_response
from wager.serve.live import PAGE_PATHS
from wager.types import NO_TENANT

log = logging.getLogger("wager.serve")

OPEN_PATHS = frozenset({"/health", "/version", *PAGE_PATHS})
"""Paths that need no key: they tell nothing about what is served."""

OPERATOR_PATHS = frozenset({"/metrics", "/live"})
"""Paths that tell of the requests of all keys."""

_GONE = 499
"""What nginx logs for a client that has gone before it was answered."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Caller(NamedTuple):
    """Whose requests these are, and whether the figures of all may be read."""

    tenant: str = NO_TENANT
    is_operator: bool = True


class ApiKeys:
    """Keys that callers must show as `Authorization: Bearer KEY`. Without any everybody may call, as one tenant. Each
    key is a tenant unless they share; a single one may read all figures, which are its own."""

    def __init__(self, keys: Sequence[str], *, operators: Sequence[str] = (), share: bool = False) -> None:
        self._digests = [sha256(key.encode()).digest() for key in dict.fromkeys((*operators, *keys))]
        self._operators = len(self._digests) if len(self._digests) == 1 or share else len(dict.fromkeys(operators))
        self._share = share

    def caller(self, authorization: str | None) -> Caller | None:
        """Who calls; None if no key fits. Every key is compared, each in constant time, so that the time tells nothing
        about them."""
        if not self._digests:
            return Caller()
        scheme, _, key = (authorization or "").partition(" ")
        given = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = -1
        for index, digest in enumerate(self._digests):
            found += (index + 1) * hmac.compare_digest(digest, given)
        if found < 0 or scheme.lower() != "bearer":
            return None
        return Caller(NO_TENANT if self._share else given.hex(), found < self._operators)


class Gate:
    """ASGI middleware. `report` is told path and status of every request that has ended."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, report: Callable[[str, int], object]) -> None:
        self._app, self._keys, self._report = app, keys, report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path, begin = Headers(scope=scope), scope["path"], time.perf_counter()
        request_id = _request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        status = _GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            caller = self._keys.caller(headers.get("authorization"))
            scope["state"]["tenant"] = caller.tenant if caller else NO_TENANT
            if refusal := self._refusal(scope, caller):
                await error_response(refusal)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as failure:
            log.exception(
                "%s %s failed", scope["method"], _printable(path), extra={"fields": {"request_id": request_id}}
            )
            if status != _GONE:  # its head was sent: the connection ends without the end of the body
                raise
            text = f"The server failed at this request: {type(failure).__name__}."
            error = ApiError(500, text, "Its log says why, under the x-request-id.")
            await error_response(error)(scope, receive, send_with_id)
        finally:
            self._report(path, status)
            _log_end(scope, status, time.perf_counter() - begin)

    @staticmethod
    def _refusal(scope: Scope, caller: Caller | None) -> ApiError | None:
        """Why a caller may not ask for this path, if so."""
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        if caller is None:
            return ApiError(401, "The API key is missing or unknown.", "Send Authorization: Bearer KEY.")
        if scope["path"] in OPERATOR_PATHS and not caller.is_operator:
            hint = "Send a key of --operator-key-file."
            return ApiError(403, "These figures are of the requests of all keys; this key may not read them.", hint)
        return None


def _log_end(scope: Scope, status: int, seconds: float) -> None:
    client, state = scope.get("client"), scope["state"]
    fields = {
        "request_id": state["request_id"],
        "client": client[0] if client else "",
        "seconds": round(seconds, 6),
        **state.get("log_fields", {}),
    }
    said = {"method": scope["method"], "path": _printable(scope["path"]), "status": status}
    log.info("%(method)s %(path)s %(status)d", said, extra={"fields": fields, "said": said})


def _printable(path: str) -> str:
    """A path for the log: what is no letter could end the line and forge another."""
    return "".join(letter if letter.isprintable() else "?" for letter in path[:200])


def _request_id(given: str | None) -> str:
    """The caller's id, if it is a short word, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, what the message says as values, and the fields of the
    record."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "said", {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, ensure_ascii=False)


class TextLines(logging.Formatter):
    """The message, and the fields of the record behind it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().format(record)} {fields}".rstrip()
