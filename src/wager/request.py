"""A request: what an engine is asked to answer, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from wager.errors import RequestError
from wager.sampling import SamplingParams
from wager.tenants import NO_TENANT
from wager.token_ids import as_token_ids


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """How one request speculates, whatever the policy would decide: `depth` guesses a step (None: the drafter's
    default; 0: none at all) by `drafter` ("": the engine's first one). The text stays the same."""

    drafter: str = ""
    depth: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str):
            raise RequestError(f"drafter = {self.drafter!r} is no name of a drafter.", "Give the name as a string.")
        depth = self.depth
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth < 2**31):
            raise RequestError(f"depth = {depth!r} is not possible.", "Give a whole number, or None for the default.")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt in token ids (any sequence of integers; kept as a tuple) and how to answer it. `weight` is what its
    tokens count for, relative to those of other requests, when the policy decides which guesses are verified;
    `speculation` decides that in the policy's place. What is learned and cached of it serves requests of the same
    `tenant` only (see tenants.py)."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    weight: float = 1.0
    speculation: RequestSpeculation | None = None
    tenant: str = NO_TENANT

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "prompt", as_token_ids(self.prompt))
        except TypeError as error:
            raise RequestError(
                f"Request {self.id!r} has no valid prompt: {error}.", "A prompt is a sequence of token ids."
            ) from None
        if not self.prompt:
            raise RequestError(f"Request {self.id!r} has an empty prompt.", "Give at least one token.")
        if not 0 < self.weight < math.inf:
            raise RequestError(f"Request {self.id!r} has weight {self.weight!r}.", "Weights are numbers above 0.")
