"""The public interface: a language model that answers prompts and conversations.

    llm = wager.LLM(model="SmolLM2-135M-Instruct", drafter="ngram")
    answer = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], wager.SamplingParams(max_tokens=100))

Prompts become token ids here; the engine computes the answers. Several threads may use one LLM: a step that
any of them takes serves the requests of all.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, overload

from wager.config import EngineConfig
from wager.engine.outputs import OutputCollector, one_or_all
from wager.engine.threads import SharedEngine
from wager.errors import ClosedError, RequestError, WagerError
from wager.loading.load import LoadedEngine, load
from wager.models.tokenizer import Tokenizer
from wager.prompts import Message, PromptType, encode_chat, encode_chats, encode_prompt, encode_prompts, is_conversation
from wager.types import Completion, OutputDelta, Request, SamplingParams, chosen_params


class LLM:
    """A loaded model. Options are those of `EngineConfig` by their flat names, such as drafter, depth, memory.

    Use it as a context manager, or call `close` when it is no longer needed. Every request that shares a beginning
    with an earlier one reuses what was computed for it, conversation after conversation, unless prefix_cache=False.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        report: Callable[[str], None] | None = None,
        expected: Callable[[Tokenizer], Sequence[Request]] | None = None,
        **options: Any,
    ) -> None:
        """Load a model; `options` and `model` change `config` (default: EngineConfig()), `report` is called with
        lines of progress. `expected` makes requests to come: RequestError before weights are read if one of them would
        be too long. Raises UsageError for an option that is unknown or impossible, before anything is loaded, and
        ModelError, DownloadError or MemoryPlanError where the model cannot be loaded."""
        if model is not None:
            options["model"] = model
        self.config = (config or EngineConfig()).with_options(**options)
        self._engine: LoadedEngine | None = load(self.config, report=report, expected=expected)
        self._shared = SharedEngine(self._engine)
        self._numbers = itertools.count()

    @property
    def engine(self) -> LoadedEngine:
        """The underlying engine (add, step, abort), for servers. ClosedError after `close`."""
        if self._engine is None:
            raise ClosedError("This LLM is closed.", "Create a new one.")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    # ---- answers ---------------------------------------------------------------------------------------------------

    @overload  # a str is a Sequence[str] to a type checker, which is why the overloads overlap
    def generate(  # type: ignore[overload-overlap]
        self, prompts: PromptType, params: SamplingParams | None = None
    ) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[PromptType], params: SamplingParams | None = None) -> list[Completion]: ...

    def generate(
        self, prompts: PromptType | Sequence[PromptType], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Continue one prompt, or several together: texts as they are, or token ids (lists, arrays, tensors).

        Control tokens written out in a text (<|im_end|>) are parsed, as in completions of llama.cpp and vLLM; text of
        strangers belongs into `chat`. One prompt returns its Completion, several a list in their order. With params.n
        above 1 it is always a list: the choices of the first prompt by `index`, then those of the next. `params` are by
        default those of the configuration. A request that fails while it runs has finish_reason "error"; if one cannot
        be served, RequestError, and none runs."""
        given, one = encode_prompts(self.tokenizer, prompts)
        return one_or_all(self._run(given, params), one=one)

    @overload
    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion: ...

    @overload
    def chat(self, messages: Sequence[Sequence[Message]], params: SamplingParams | None = None) -> list[Completion]: ...

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Answer a conversation, or a list of them, through the model's chat template, which alone writes control
        tokens: messages stay text. Otherwise as `generate`. TokenizerError if it is absent or refuses them."""
        given, one = encode_chats(self.tokenizer, messages)
        return one_or_all(self._run(given, params), one=one)

    def stream(self, prompt: PromptType | Sequence[Message], params: SamplingParams | None = None) -> OutputStream:
        """Begin to answer a prompt or a conversation: an iterator over the output deltas of each step.

        Closing it, or dropping it as a `for` loop does that is left early, aborts the request and frees its blocks.
        Several streams may be open at once; each step serves them all. Errors as for `generate`, raised here.
        """
        encode = encode_chat if is_conversation(prompt) else encode_prompt
        return OutputStream(self._shared, self._request(encode(self.tokenizer, prompt), params, streamed=True))  # type: ignore[arg-type]

    def close(self) -> None:
        """End every request (open streams end with finish_reason "abort") and release the model. May be repeated."""
        self._shared.close()
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _request(self, tokens: tuple[int, ...], params: SamplingParams | None, *, streamed: bool = False) -> Request:
        name = f"llm-{next(self._numbers)}"
        return Request(name, tokens, chosen_params(params, self.config.sampling), streamed=streamed)

    def _run(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams | None) -> list[Completion]:
        requests = [self._request(tokens, params) for tokens in prompts]
        collector = OutputCollector()
        try:
            for request in requests:
                collector.expect(request)
                self._shared.add(request, collector.add)
            ids = [request.id for request in requests]
            while self._shared.advance(ids):
                pass
        except BaseException:
            for request in requests:
                self._shared.drop(request.id)
            raise
        return collector.completions()


class OutputStream(Iterator[OutputDelta]):
    """The answer to one request (`request`) as it grows: iterate over it; made by `LLM.stream`.

    The last delta of each choice has finish_reason and stats; with finish_reason "error", `error` has the message.
    """

    def __init__(self, shared: SharedEngine, request: Request) -> None:
        deltas: deque[OutputDelta] = deque()
        collector = OutputCollector()

        def take(delta: OutputDelta) -> None:  # must not refer to the stream, or dropping it would not close it
            collector.add(delta)
            deltas.append(delta)

        self._shared = shared
        self._id = request.id
        self._deltas = deltas
        self._collector = collector
        self._closed = False
        self.request = request
        collector.expect(request)
        shared.add(request, take)

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> OutputDelta:
        """The next delta, after as many steps as it takes. StopIteration after the last one, or once closed."""
        while True:
            with self._shared:  # another thread's step may bring this request's deltas, its last ones too
                if self._deltas:
                    return self._deltas.popleft()
                try:
                    running = not self._closed and self._shared.advance([self._id])
                except BaseException:
                    self.close()
                    raise
                if not running:
                    raise StopIteration

    def completions(self) -> list[Completion]:
        """Every completed choice, in order of `index`, once the stream has ended. RequestError before that."""
        if self._closed or self._deltas or self._shared.runs(self._id):
            raise RequestError("The stream has not ended yet.", "Iterate over it until it stops.")
        return self._collector.completions()

    def abort(self) -> None:
        """End the request now; the stream still yields its last deltas, with finish_reason "abort" and the stats."""
        self._shared.abort(self._id)

    def close(self) -> None:
        """End the request, if it still runs, and the stream. May be repeated."""
        self._closed = True
        self._deltas.clear()
        self._shared.drop(self._id)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError, WagerError):  # not fully constructed, or the engine is closed
            self.close()
