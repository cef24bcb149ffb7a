"""The ASGI application: paths, errors, keys, CORS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from wager import __version__
from wager.async_llm import AsyncLLM
from wager.errors import WagerError
from wager.serve.admission import Admission
from wager.serve.body_process import BodyKind, RequestReader
from wager.serve.errors import ApiError, error_response
from wager.serve.gate import ApiKeys, Gate
from wager.serve.generation import Generation
from wager.serve.limits import BodyLimits
from wager.serve.live import PAGE_PATHS, LiveView
from wager.serve.metrics import CONTENT_TYPE, Metrics
from wager.serve.options import ServeOptions
from wager.serve.totals import StepTotals
from wager.serve.work import ParsingContext, check_model
from wager.types import OutputDelta, StepRecord

_MOST_TOLD = 32
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
        self.llm, self.options = llm, options
        self.admission = Admission(running=llm.engine.scheduler.max_sequences, max_waiting=options.max_waiting)
        self._totals, name = StepTotals(), options.model_name
        self.metrics = Metrics(llm, self.admission, self._totals, model=name)
        self.live = LiveView(llm, self.admission, self._totals, self.metrics.drafts, model=name)
        llm.on_step, llm.most_told = self._on_step, _MOST_TOLD
        self.limits, self.bodies = BodyLimits(options), RequestReader(_served_model(llm, options))
        self.generation = Generation(llm, options, self.limits, self.bodies, self.admission, self.metrics)
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        generation = self.generation
        routes = [
            Route("/v1/completions", generation.completions, methods=["POST"]),
            Route("/v1/chat/completions", generation.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.read_metrics),
            Route("/openapi.json", self.describe),
            Route("/live", self.live.read),
            *(Route(path, self.live.page) for path in PAGE_PATHS),
        ]
        paths = {route.path for route in routes}

        def report(path: str, status: int) -> None:
            self.metrics.http(path if path in paths else "other", status)

        options = self.options
        keys = ApiKeys(options.api_keys, operators=options.operator_keys, share=options.share_between_keys)
        middleware = [Middleware(Gate, keys=keys, report=report)]
        if self.options.cors:  # around the gate, so that a page can read why it was refused
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware,
                    allow_origins=self.options.cors,
                    allow_methods=("GET", "POST"),
                    allow_headers=("*",),
                    expose_headers=("x-request-id", "retry-after"),
                ),
            )
        errors = {WagerError: _refuse, HTTPException: _refuse_http}
        app = Starlette(routes=routes, middleware=middleware, exception_handlers=errors, lifespan=self._lifespan)
        app.router.redirect_slashes = False  # a redirect would name whatever host the caller does
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        preparing = asyncio.create_task(self._prepare())
        try:
            yield
        finally:
            preparing.cancel()
            await asyncio.wait([preparing])
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
            self._totals.add(record)
            self.live.step(record)

    # ---- questions about the server ----------------------------------------------------------------------------------

    async def models(self, http: Request) -> Response:
        del http
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: Request) -> Response:
        check_model(http.path_params["name"], self.options.model_name)
        return JSONResponse(self._model())

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

    async def describe(self, http: Request) -> Response:
        """The API for machines; see openapi.py, which is imported when somebody asks."""
        from wager.serve.openapi import document

        del http
        return JSONResponse(document())

    async def read_metrics(self, http: Request) -> Response:
        del http
        return Response(await self.metrics.render(), media_type=CONTENT_TYPE)

    async def tokenize(self, http: Request) -> Response:
        return await self._converted(http, "encode")

    async def detokenize(self, http: Request) -> Response:
        return await self._converted(http, "decode")

    async def _converted(self, http: Request, kind: BodyKind) -> Response:
        async with self.limits.body(http) as raw:
            content = await self.bodies.read(kind, raw, http.state.request_id)
        return Response(content, media_type="application/json")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.options.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "wager",
            "max_model_len": self.llm.engine.scheduler.max_context,
        }


def _served_model(llm: AsyncLLM, options: ServeOptions) -> ParsingContext:
    scheduler = llm.engine.scheduler
    return ParsingContext(
        name=options.model_name,
        tokenizer=llm.tokenizer,
        max_context=scheduler.max_context,
        num_blocks=scheduler.block_pool.num_blocks,
        vocab=llm.engine.runner.target.vocab,
        temperature=options.default_temperature,
    )


async def _refuse(http: Request, error: Exception) -> Response:
    del http
    return error_response(cast(WagerError, error))


async def _refuse_http(http: Request, error: Exception) -> Response:
    error = cast(HTTPException, error)
    message = {404: f"There is nothing at {http.scope['path'][:200]}.", 405: f"{http.method} is not possible here."}
    response = error_response(ApiError(error.status_code, message.get(error.status_code, str(error.detail))))
    response.headers.update(error.headers or {})  # of 405: what is possible
    return response
