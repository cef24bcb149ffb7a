"""The server of a load test: which model it serves, in what form requests are sent, and whether it answers at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wager.bench.load_answer import FAILURES, OK, BodyReader
from wager.bench.load_client import Ask, LoadClient, LoadPlan, distinct
from wager.bench.load_http import Connections, ExchangeError, ServerAddress
from wager.bench.workload import Prompt
from wager.errors import RequestError, WagerError

USAGE = {"include_usage": True}
USAGE_BY_CHUNK = {"include_usage": True, "continuous_usage_stats": True}
"""OpenAI's stream_options, and those with vLLM's extension: usage so far in every chunk."""

WARM_UP_TOKENS = 16

Messages = Callable[[str], list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The body of a request. `messages` makes a conversation of a prompt; None sends the prompt to /completions.
    `options` are further fields of every request, of which a null removes the field of that name."""

    model: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    messages: Messages | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stream_options: Mapping[str, Any] | None = None

    @property
    def path(self) -> str:
        return "/chat/completions" if self.messages else "/completions"

    def body(self, text: str, number: int) -> bytes:
        """Of request `number`; sampled requests have a seed each."""
        fields: dict[str, Any] = {"model": self.model}
        fields |= {"messages": self.messages(text)} if self.messages else {"prompt": text}
        fields |= {"max_tokens": self.max_tokens, "temperature": self.temperature, "stream": True}
        if self.stream_options:
            fields["stream_options"] = self.stream_options
        if self.seed is not None and self.temperature > 0:
            fields["seed"] = self.seed + number
        fields |= self.options
        return json.dumps({key: value for key, value in fields.items() if value is not None}).encode()


@dataclass(slots=True)
class LoadTarget:
    """A server, the key for it and the form of requests that it understands."""

    server: ServerAddress
    connections: Connections
    form: RequestForm
    key: str | None = None
    software: Mapping[str, str | None] = field(default_factory=dict)

    async def ask_model(self) -> str:
        """The first of /v1/models; `software` is then what the answer says of the server. WagerError if it names no
        model."""
        reader = BodyReader()
        try:
            await self.connections.exchange(self.server.request("/models", None, key=self.key), reader)
        except ExchangeError as error:
            raise WagerError(f"{self.server.url}/models: {error.message}.", _reach_hint(error.kind)) from error
        if reader.status != 200:
            cause = f"{self.server.url}/models answered with status {reader.status}: {reader.reason}"
            raise WagerError(cause, _status_hint(reader.status))
        try:
            first = json.loads(reader.data)["data"][0]
            self.software = {"header": reader.headers.get("server"), "owned_by": first.get("owned_by")}
            return str(first["id"])
        except (AttributeError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise WagerError(f"{self.server.url}/models names no model.", "Name it with --model.") from error

    async def warm_up(self, requests: int, concurrency: int) -> None:
        """Find the form of requests that the server takes, by a short one; then send some more of them together.

        A server that refuses stream_options with status 400 or 422 is asked without. RequestError where it does not
        answer: the measurement would be one of errors.
        """
        wanted = self.form.stream_options
        forms = [wanted, USAGE, None] if wanted == USAGE_BY_CHUNK else [wanted, None] if wanted else [None]
        for stream_options in forms:
            self.form = replace(self.form, stream_options=stream_options)
            kind, message = await self._try(1, 1)
            if kind != "status" or not message.startswith(("status 400", "status 422")):
                break
        if kind == OK and requests > 1:
            kind, message = await self._try(requests, concurrency)
        if kind != OK:
            status = int(message[7:10]) if kind == "status" else 0
            hint = _status_hint(status) if status else _reach_hint(kind)
            raise RequestError(
                f"{self.server.url} failed to answer a first short request: {message.rstrip('.')}.", hint
            )

    async def _try(self, requests: int, concurrency: int) -> tuple[str, str]:
        """The outcome of short requests: of the first that failed, or OK."""
        short = replace(self.form, max_tokens=min(WARM_UP_TOKENS, self.form.max_tokens))
        prompts = [Prompt(n, "", f"Tell me something about the number {requests * 1000 + n}.") for n in range(requests)]
        plan = LoadPlan(concurrency=min(requests, concurrency), requests=requests)
        run = await LoadClient(plan, self.connections, self.asks(prompts, short)).run()
        failed = [answer for answer in run.answers if answer.outcome not in (OK, "refused")]
        return (failed[0].outcome, failed[0].message) if failed else (OK, "")

    def asks(self, prompts: Sequence[Prompt], form: RequestForm | None = None) -> Ask:
        """The requests of these prompts, by number."""
        form = form or self.form

        def ask(number: int) -> tuple[Prompt, bytes]:
            prompt = distinct(prompts, number)
            return prompt, self.server.request(form.path, form.body(prompt.text, number), key=self.key)

        return ask


def _status_hint(status: int) -> str:
    if status in (401, 403):
        return "Give the server's key with --api-key-file, or in the environment variable WAGER_API_KEY."
    if status == 404:
        return "Check --url, whose path is /v1 on most servers, and --model."
    return "Check --model, --max-tokens and --body."


def _reach_hint(kind: str) -> str:
    if kind == "connect":
        return "Check --url, and that the server is running."
    return f"The request failed as {kind!r}: {FAILURES.get(kind, 'unknown')}."
