"""The ASGI application: paths, errors, keys, CORS."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple, cast

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wager import __version__
from wager.async_llm import AsyncLLM
from wager.errors import WagerError
from wager.serve.body_process import BodyKind, BodyReader
from wager.serve.errors import ApiError, error_response
from wager.serve.generation import Generation, log_warnings, warning_headers
from wager.serve.limits import Admission, BodyLimits, ServeOptions
from wager.serve.live import PAGE_PATHS, LiveView
from wager.serve.metrics import CONTENT_TYPE, Metrics, StepTotals
from wager.serve.parsing import ParsingContext, check_model, printable
from wager.serve.responses import not_kept
from wager.types import NO_TENANT, OutputDelta, StepRecord

_STREAMS_PER_STEP = 32
"""Streams that all get a chunk after every step. Writing takes a core from the engine, some 40 us a chunk, half of it
in the socket: with more streams, each gets the tokens of two to four steps at once."""

_FIRST_REQUESTS_S = 0.5
"""Seconds after the start in which the tables of grammars are not made: first answers come first."""

_LATEST_TABLES_S = 5.0
"""Seconds after which they are made although requests run."""


class Server:
    """The handlers that answer nothing but questions about the server, and the application with all of them.

    It closes `llm` when the application shuts down.
    """

    def __init__(self, llm: AsyncLLM, options: ServeOptions) -> None:
        self.llm = llm
        self.options = options
        self.admission = Admission(running=llm.engine.scheduler.max_sequences, max_waiting=options.max_waiting)
        self._totals = StepTotals()
        name = options.model_name
        self.metrics = Metrics(llm, self.admission, self._totals, model=name)
        self.live = LiveView(llm, self.admission, self._totals, self.metrics, model=name)
        llm.on_step = self._on_step
        llm.streams_per_step = _STREAMS_PER_STEP
        self.limits = BodyLimits(options)
        scheduler = llm.engine.scheduler
        self.bodies = BodyReader(
            ParsingContext(
                names=options.model_names,
                strict=options.strict_fields,
                tokenizer=llm.tokenizer,
                max_context=scheduler.max_context,
                num_blocks=scheduler.block_pool.num_blocks,
                vocab=llm.engine.runner.target.vocab,
                temperature=options.default_temperature,
                tenant_by=options.tenant_by,
            )
        )
        self.generation = Generation(llm, options, self.limits, self.bodies, self.admission, self.metrics)
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        generation = self.generation
        routes = [
            Route("/v1/completions", partial(generation.respond, kind="completion"), methods=["POST"]),
            Route("/v1/chat/completions", partial(generation.respond, kind="chat"), methods=["POST"]),
            Route("/v1/responses", partial(generation.respond, kind="response"), methods=["POST"]),
            Route("/v1/responses/{name}", self.kept_response, methods=["GET", "DELETE"]),
            Route("/v1/messages", partial(generation.respond, kind="message"), methods=["POST"]),
            Route("/v1/messages/count_tokens", partial(self.convert, kind="count_tokens"), methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", partial(self.convert, kind="tokenize"), methods=["POST"]),
            Route("/detokenize", partial(self.convert, kind="detokenize"), methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", for_operators(self.read_metrics)),
            Route("/live", for_operators(self.live.read)),
            *(Route(path, self.live.page) for path in PAGE_PATHS),
        ]
        paths = {route.path for route in routes}

        def report(path: str, status: int) -> None:
            self.metrics.http(path if path in paths else "other", status)

        options = self.options
        keys = ApiKeys(options.api_keys, operators=options.operator_keys, share=options.share_between_keys)
        middleware = [Middleware(AccessMiddleware, keys=keys, report=report)]
        if self.options.cors:  # outermost, so that a page can read why it was refused
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=self.options.cors,
                    allow_methods=("GET", "POST", "DELETE"),
                    allow_headers=("*",),
                    expose_headers=("x-request-id", "request-id", "x-wager-warning", "retry-after"),
                ),
            )
        errors = {WagerError: _refuse, HTTPException: _refuse_http}
        app = Starlette(routes=routes, middleware=middleware, exception_handlers=errors, lifespan=self._lifespan)
        app.router.redirect_slashes = False  # a redirect would name whatever host the caller does
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        tasks = [asyncio.create_task(task) for task in (self._prepare(), self.live.watch())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.bodies.close()
            await self.llm.close()

    async def _prepare(self) -> None:
        """Make what the first conversation and the first grammar would wait for. The tables of grammars hold the
        interpreter's lock twice for some 60 ms: they are made while no request runs, if such a moment comes soon."""
        await asyncio.to_thread(self.bodies.prepare)
        latest = time.monotonic() + _LATEST_TABLES_S
        await asyncio.sleep(_FIRST_REQUESTS_S)
        while self.admission.open and time.monotonic() < latest:
            await asyncio.sleep(_FIRST_REQUESTS_S / 5)
        if self.llm.engine.grammars is not None:
            with suppress(WagerError):  # the first request with a grammar gets the error
                await asyncio.to_thread(self.llm.engine.grammars.prepare)

    def _on_step(self, deltas: Sequence[OutputDelta], record: StepRecord | None) -> None:
        self.metrics.step(deltas, record)
        if record is not None:
            self._totals.add(record, deltas)
            self.live.step(record)

    # ---- questions about the server ----------------------------------------------------------------------------------

    async def models(self, http: Request) -> Response:
        del http
        models = [self._model(name) for name in self.options.model_names]
        return JSONResponse(
            {
                "object": "list",
                "data": models,
                "first_id": models[0]["id"],
                "last_id": models[-1]["id"],
                "has_more": False,
            }
        )

    async def model(self, http: Request) -> Response:
        name = http.path_params["name"]
        if not name:  # there is a slash too many
            raise HTTPException(404)
        return JSONResponse(self._model(check_model(name, self.options.model_names)))

    async def kept_response(self, http: Request) -> Response:
        """A response that was stored with the same key: it is given, or deleted."""
        tenant, name = http.state.tenant, http.path_params["name"]
        kept = self.generation.kept.get(tenant, name)
        if kept is None:
            raise not_kept(name)
        if http.method == "DELETE":
            self.generation.kept.delete(tenant, name)
            return JSONResponse({"id": name, "object": "response.deleted", "deleted": True})
        return Response(kept.response, media_type="application/json")

    async def tokenizer_info(self, http: Request) -> Response:
        """The tokens around a text and the chat template, under the names that vLLM's server has for them."""
        del http
        tokenizer = self.llm.tokenizer
        tokens = {name: tokenizer.named.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return JSONResponse({**tokens, "chat_template": tokenizer.chat_template})

    async def embeddings(self, http: Request) -> Response:
        del http
        raise ApiError(
            501, "This server has no embeddings: it generates text.", "Use a server with an embedding model."
        )

    async def health(self, http: Request) -> Response:
        """200 while requests are taken; 503 with the reason if not."""
        del http
        if self.llm.failure is not None:
            return error_response(ApiError(503, f"The engine stopped: {self.llm.failure.message}", "Restart it."))
        if self.admission.draining:
            return error_response(ApiError(503, "The server is shutting down."))
        return JSONResponse({"status": "ok"})

    async def version(self, http: Request) -> Response:
        del http
        return JSONResponse({"version": __version__})

    async def read_metrics(self, http: Request) -> Response:
        del http
        return Response(await self.metrics.render(), media_type=CONTENT_TYPE)

    async def convert(self, http: Request, kind: BodyKind) -> Response:
        """Tokens of a text, or the text of tokens."""
        async with self.limits.body(http) as raw:
            content, warnings = await self.bodies.read(kind, raw, http.state.request_id, tenant=http.state.tenant)
        log_warnings(http, warnings)
        return Response(content, headers=warning_headers(warnings), media_type="application/json")

    def _model(self, name: str) -> dict[str, Any]:
        """In the words of OpenAI's API and of Anthropic's."""
        context = self.llm.engine.scheduler.max_context
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "wager",
            "max_model_len": context,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
            "max_input_tokens": context,
            "lifecycle": "active",
        }


async def _refuse(http: Request, error: Exception) -> Response:
    return error_response(cast(WagerError, error), http.scope)


async def _refuse_http(http: Request, error: Exception) -> Response:
    error = cast(HTTPException, error)
    path = http.scope["path"][:200]
    message, hint = str(error.detail), ""
    if error.status_code == 404:
        message, hint = f"There is nothing at {path}.", _near(path, {route.path for route in http.app.routes})
    elif error.status_code == 405:
        allowed = " or ".join(sorted((error.headers or {})["Allow"].split(", ")))
        message, hint = f"{http.method} is not possible at {path}.", f"Send {allowed}."
    response = error_response(ApiError(error.status_code, message, hint), http.scope)
    response.headers.update(error.headers or {})  # of 405: what is possible
    return response


def _near(path: str, paths: Iterable[str]) -> str:
    """Which path is meant: a base URL has no /v1, or one too many, or a slash stands at the end."""
    whole = re.sub(r"/{2,}", "/", path).rstrip("/")
    last = whole.removeprefix("/v1").removeprefix("/v1")
    for meant in (f"/v1{last}", last):
        if meant in paths:
            change = "take a /v1 from" if len(whole) > len(meant) else "add /v1 to"
            change = "take a slash from" if whole == meant else change
            return f"Is {meant} meant? Then {change} the client's base URL."
    return "OpenAI's API begins at /v1, Anthropic's is /v1/messages."


# ---- keys, ids and the log of requests

log = logging.getLogger("wager.serve")

OPEN_PATHS = frozenset({"/health", "/version", *PAGE_PATHS})
"""Paths that need no key: they tell nothing about what is served."""

Handler = Callable[[Request], Awaitable[Response]]

_GONE = 499
"""What nginx logs for a client that has gone before it was answered."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Caller(NamedTuple):
    """Whose requests these are, whether the figures of all may be read, and what the log calls the key: nothing of it,
    but its place in its file."""

    tenant: str = NO_TENANT
    is_operator: bool = True
    name: str = ""


def for_operators(handler: Handler) -> Handler:
    """A handler whose figures are of all keys answers operators alone. It is checked here and not by the path, since
    another spelling of the path leads here too: `/metrics%0A` does."""

    async def checked(http: Request) -> Response:
        if not http.state.is_operator:
            hint = "Send a key of --operator-key-file."
            raise ApiError(403, "These figures are of the requests of all keys; this key may not read them.", hint)
        return await handler(http)

    return checked


class ApiKeys:
    """Keys that callers must show as `Authorization: Bearer KEY`. Without any everybody may call, as one tenant. Each
    key is a tenant unless they share; a single one may read all figures, which are its own."""

    def __init__(self, keys: Sequence[str], *, operators: Sequence[str] = (), share: bool = False) -> None:
        named = [(key, f"operator-key-{number}") for number, key in enumerate(operators, 1)]
        named += [(key, f"api-key-{number}") for number, key in enumerate(keys, 1)]
        names = dict(reversed(named))  # of a key that is named twice, the first name
        self._names = [names[key] for key, _ in dict(named).items()]
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
        return Caller(NO_TENANT if self._share else given.hex(), found < self._operators, self._names[found])


@dataclass(eq=False)
class AccessMiddleware:
    """ASGI middleware. `report` gets path and status of every request that has ended; of a stream that ended with an
    error, the status of that."""

    app: ASGIApp
    keys: ApiKeys
    report: Callable[[str, int], object]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        begin = time.perf_counter()
        request_id = _request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        status = _GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update({"x-request-id": request_id, "request-id": request_id})
            await send(message)

        try:
            sent = (headers.get("authorization"), f"Bearer {headers.get('x-api-key', '')}")
            caller = next(filter(None, map(self.keys.caller, sent)), None)
            scope["state"]["tenant"] = caller.tenant if caller else NO_TENANT
            scope["state"]["key_name"] = caller.name if caller else ""
            scope["state"]["is_operator"] = caller is not None and caller.is_operator
            if refusal := self._refusal(scope, caller, sent[0] or sent[1]):
                await error_response(refusal, scope)(scope, receive, send_with_id)
            else:
                await self.app(scope, receive, send_with_id)
        except Exception as failure:
            log.exception(
                "%s %s failed", scope["method"], printable(path[:200]), extra={"fields": {"request_id": request_id}}
            )
            if status != _GONE:  # its head was sent: the connection ends without the end of the body
                raise
            text = f"The server failed at this request: {type(failure).__name__}."
            error = ApiError(500, text, "Its log says why, under the x-request-id.")
            await error_response(error, scope)(scope, receive, send_with_id)
        finally:
            self.report(path, scope["state"].get("log_fields", {}).get("error", status))
            _log_end(scope, status, time.perf_counter() - begin)

    @staticmethod
    def _refusal(scope: Scope, caller: Caller | None, authorization: str | None) -> ApiError | None:
        """Why a caller who sent that header may not ask for this path, if so."""
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        if caller is None:
            scheme, _, key = (authorization or "").partition(" ")
            message = "The API key is not known." if key else "The API key is missing."
            if scheme and scheme.lower() != "bearer":
                message = "The Authorization header does not begin with Bearer."
            return ApiError(401, message, "Send Authorization: Bearer KEY, or x-api-key: KEY.")
        return None


def _log_end(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client")
    state = scope["state"]
    fields = {
        "request_id": state["request_id"],
        "client": client[0] if client else "",
        "seconds": round(seconds, 6),
        **({"tenant": state["key_name"]} if state.get("key_name") else {}),
        **state.get("log_fields", {}),
    }
    said = {"method": scope["method"], "path": printable(scope["path"][:200]), "status": status}
    log.info("%(method)s %(path)s %(status)d", said, extra={"fields": fields, "said": said})


def _request_id(given: str | None) -> str:
    """The caller's id, if it is a short word, else a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
