"""What the server answers, as models: OpenAPI's document is made of them, and tests check every answer against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReasons = Literal["stop", "length", "tool_calls", "abort", "error"]


class Answered(BaseModel):
    """Has these fields and no others; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorFields(Answered):
    """`param` is the field at fault, `code` a word for the cause."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class ErrorAnswer(Answered):
    """Every answer that is no success."""

    error: ErrorFields


# ---- answers of the model --------------------------------------------------------------------------------------------


class PromptTokens(Answered):
    cached_tokens: int


class PredictionTokens(Answered):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenUsage(Answered):
    """Without details in chunks before the last."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None
    completion_tokens_details: PredictionTokens | None = None


class TextLogprobs(Answered):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class AlternativeToken(Answered):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenToken(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(Answered):
    content: list[ChosenToken]
    refusal: None


class DraftedPart(Answered):
    text: str
    drafter: str


class ChunkSpeculation(Answered):
    """Who guessed a chunk's text, how many guesses were rejected, and which, where they may be shown."""

    token_ids: list[int]
    drafted_by: list[str]
    parts: list[DraftedPart]
    rejected: list[str]
    rejected_tokens: int
    drafter: str


class SpeculationStats(Answered):
    rounds: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    drafter: str
    prefill_s: float
    decode_s: float
    preemptions: int
    seed: int


class SpeculationReport(Answered):
    """A row for each choice, and seconds by stage of the steps that emitted for the answer."""

    choices: list[SpeculationStats]
    stage_seconds: dict[str, float]


class TextChoice(Answered):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasons | None
    speculation: ChunkSpeculation | None = None


class ModelAnswer(Answered):
    """What every answer of the model has, whole or an event of a stream."""

    id: str
    created: int
    model: str
    usage: TokenUsage | None = None
    speculation: SpeculationReport | None = None


class TextAnswer(ModelAnswer):
    """Of /v1/completions: whole, and each event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class CalledFunction(Answered):
    """In chunks the first piece of a call has its name."""

    name: str | None = None
    arguments: str


class ToolCallPart(Answered):
    """A call, or in chunks a piece of one."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AnswerMessage(Answered):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallPart] | None = None


class ChatChoice(Answered):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasons


class ChatAnswer(ModelAnswer):
    """Of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class MessageDelta(Answered):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChunkChoice(Answered):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasons | None
    speculation: ChunkSpeculation | None = None


class ChatChunk(ModelAnswer):
    """Each event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


# ---- answers about the server ----------------------------------------------------------------------------------------


class ServedModel(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["wager"]
    max_model_len: int


class ServedModels(Answered):
    object: Literal["list"]
    data: list[ServedModel]


class TokenList(Answered):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DecodedText(Answered):
    prompt: str


class ServerHealth(Answered):
    status: Literal["ok"]


class ServerVersion(Answered):
    version: str


class LiveNumbers(BaseModel):
    """What the dashboard shows; it may grow."""

    model: str
    version: str
    drafts: dict[str, Any]
