"""Errors as OpenAI's API gives them: {"error": {"message", "type", "param", "code"}}; `code` is a word or null. Below
/v1/messages, and to Anthropic's clients, they are as that API gives them: {"type": "error", "error": {"type",
"message"}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from wager.errors import ClosedError, WagerError
from wager.types import Completion, OutputDelta

_LONGEST = 2000
"""Characters of a message: what is quoted in it may be long."""

_CODES: Mapping[int, str] = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class ApiError(WagerError):
    """A refusal with its HTTP status; `param` is the field at fault, `code` OpenAI's word for the cause, where it has
    one, `retry_after` seconds until a new attempt."""

    def __init__(
        self,
        status: int,
        message: str,
        hint: str = "",
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.param = param
        self.code = code or _CODES.get(status)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """An exception is written without what is given by name."""
        return ApiError, (self.status, self.message, self.hint), self.__dict__


def field_error(param: str | None, message: str, hint: str = "", *, code: str | None = None) -> ApiError:
    """The refusal of a field."""
    return ApiError(400, message, hint, param=param, code=code)


def failed_answer(choice: Completion | OutputDelta) -> ApiError | None:
    """The error of a choice that did not come to its end, with the status of its cause; None for one that did."""
    if choice.finish_reason == "abort":
        return ApiError(503, "The server ended the request.", "Send it again.", retry_after=30)
    if choice.finish_reason == "error":
        return ApiError(choice.error_status or 500, " ".join(choice.error.split("\n")))
    return None


def error_message(error: WagerError) -> str:
    """What it says to a caller."""
    return f"{error.message[:_LONGEST]} {error.hint}" if error.hint else error.message[:_LONGEST]


def error_body(error: WagerError) -> dict[str, object]:
    """The JSON of an error."""
    message = error_message(error)
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    kind = "server_error" if error.status >= 500 else kind
    param, code = (error.param, error.code) if isinstance(error, ApiError) else (None, None)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


MESSAGES_PATH = "/v1/messages"

_MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: WagerError, request_id: str | None = None) -> dict[str, object]:
    """The JSON of an error as Anthropic's API gives it."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    reason = {"type": _MESSAGES_TYPES.get(error.status, other), "message": error_message(error)}
    return {"type": "error", "error": reason, "request_id": request_id}


def _asks_in_anthropics_words(scope: Scope) -> bool:
    path: str = scope["path"]
    of_client = any(name == b"anthropic-version" for name, _ in scope["headers"])  # also where the path is wrong
    return of_client or path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_response(error: WagerError, scope: Scope | None = None) -> Response:
    """The answer with an error to the request of `scope`, in the form of its path or its client."""
    headers = {}
    if isinstance(error, ApiError) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, ClosedError):
        headers["retry-after"] = "30"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if scope and _asks_in_anthropics_words(scope):
        body = messages_error(error, scope.get("state", {}).get("request_id"))
    else:
        body = error_body(error)
    return Response(json.dumps(body), error.status, headers, "application/json")
