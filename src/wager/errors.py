"""Every error that is raised on purpose: one sentence that names the cause, and a hint.

The command line prints `message` and `hint` and exits with 2 for a UsageError, with 1 for the others; a server answers
with `status`.
"""

from __future__ import annotations

MALFORMED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What Python itself raises where values from a file are of other types, sizes or ranges than the reader expects."""


class WagerError(Exception):
    """Base of everything wager raises on purpose.

    `message` is one sentence that names the cause; `hint` suggests what to do about it;
    `status` is the HTTP status a server answers with.
    """

    status = 500

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(WagerError):
    """An option, parameter or configuration key that is unknown, misspelt or out of range."""

    status = 400


class SetupError(UsageError):
    """An option that is possible, but not with this model: its context is shorter, or its cache of another kind."""


class RequestError(WagerError):
    """A request that cannot be served (too long, empty, unknown token id). `field` is the part of it at fault, by its
    name in Request or SamplingParams, if it is one."""

    status = 400

    def __init__(self, message: str, hint: str = "", *, field: str = "") -> None:
        super().__init__(message, hint)
        self.field = field


class ModelError(WagerError):
    """A model that cannot be loaded: unknown architecture, missing or misshapen tensor, damaged file."""

    status = 400


class TokenizerError(ModelError):
    """A tokenizer or chat template that is absent, damaged, or unlike the one it must equal."""


class DownloadError(WagerError):
    """A model that could not be fetched, or whose bytes are not the expected ones."""

    status = 502


class MemoryPlanError(WagerError):
    """Weights, cache, workspace and drafter do not fit; the message carries the figures."""

    status = 507


class ClosedError(WagerError):
    """The LLM was closed; it serves no further request."""

    status = 503


class NumericsError(WagerError):
    """The model produced logits that are not numbers; the request ends with this error."""


class GrammarError(WagerError):
    """A grammar that allows no token at some position, or is too costly there; the request ends with this error."""

    status = 400


class CacheIntegrityError(WagerError):
    """The block accounting of the cache contradicts itself: a defect in wager, not in its use."""
