"""From the fields of a request to the parameters of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from wager.errors import UsageError
from wager.serve.bodies import ChatBody, CompletionBody, SamplingFields
from wager.serve.errors import ApiError
from wager.types import Grammar, RequestSpeculation, SamplingParams

_LONGEST_ID = 10
"""Digits of a token id."""

_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chats go on until the context is full."""


def completion_params(body: CompletionBody, *, temperature: float) -> SamplingParams:
    """The parameters of a completion; `temperature` where it names none."""
    return _params(body, body.max_tokens or _COMPLETION_TOKENS, body.logprobs, temperature=temperature)


def chat_params(
    body: ChatBody, *, room: int, temperature: float, prediction: Sequence[int], tool_grammar: Grammar | None = None
) -> SamplingParams:
    """The parameters of a chat; `room` is what the context leaves for its answer, `prediction` its prediction in
    tokens, `tool_grammar` what its tools demand."""
    most = body.max_completion_tokens or body.max_tokens or max(1, room)
    if body.max_tokens not in (None, most):
        raise ApiError(
            400,
            f"max_tokens = {body.max_tokens} and max_completion_tokens = {most} differ.",
            "Send one of the two.",
            param="max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs.", "Send logprobs: true too.", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, most, logprobs, temperature=temperature, prediction=prediction, tool_grammar=tool_grammar)


def speculation(body: SamplingFields) -> RequestSpeculation | None:
    """What the request says about how it is drafted, if anything."""
    choice = body.speculation
    if choice is None:
        return None
    if choice == "off":
        return RequestSpeculation(depth=0)
    if choice.drafter is None and choice.depth is None:
        return None
    return RequestSpeculation(choice.drafter or "", choice.depth)


def _params(
    body: SamplingFields,
    max_tokens: int,
    logprobs: int | None,
    *,
    temperature: float,
    prediction: Sequence[int] = (),
    tool_grammar: Grammar | None = None,
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream.", "Send stream: true too.", param="stream_options")
    wanted = body.response_format.grammar if body.response_format else None
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature if body.temperature is None else float(body.temperature),
            top_k=max(0, body.top_k or 0),  # -1 is vLLM's way to say that there is none
            top_p=1.0 if body.top_p is None else float(body.top_p),
            min_p=float(body.min_p or 0.0),
            repetition_penalty=float(body.repetition_penalty or 1.0),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            logit_bias=_logit_bias(body),
            seed=_seed(body.seed),
            stop=tuple(body.stop) if isinstance(body.stop, list) else body.stop or (),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            n=body.n or 1,
            prediction=prediction,
            grammar=tool_grammar or wanted,
        )
    except UsageError as error:
        name = error.message.split(" ", 1)[0].split("[", 1)[0]
        raise ApiError(
            400, error.message, error.hint, param=name if name in type(body).model_fields else None
        ) from None


def _seed(seed: int | None) -> int | None:
    """Any 64-bit integer, as OpenAI's API takes them; negative ones are taken modulo 2^64."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**64:
        raise ApiError(400, f"seed = {str(seed)[:40]} has more than 64 bits.", "Give a 64-bit integer.", param="seed")
    return seed % 2**64


def _logit_bias(body: SamplingFields) -> dict[int, float]:
    biases = {}
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID):
            raise ApiError(400, f"logit_bias has the key {key[:80]!r}.", "Keys are token ids.", param="logit_bias")
        biases[int(key)] = float(bias)
    return biases
