"""What the answers of the server must be like: models with every field that may be in them, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from wager.serve.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from wager.serve.messages import MessagesBody, TokenCountBody
from wager.serve.responses import ResponsesBody

FinishReasons = Literal["stop", "length", "tool_calls", "function_call", "abort", "error"]


class AnswerFields(BaseModel):
    """Has these fields and no others; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorFields(AnswerFields):
    """`param` is the field at fault, `code` a word for the cause."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(AnswerFields):
    """Every answer that is no success."""

    error: ErrorFields


# ---- answers of the model --------------------------------------------------------------------------------------------


class PromptTokens(AnswerFields):
    cached_tokens: int


class PredictionTokens(AnswerFields):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenUsage(AnswerFields):
    """Without details in chunks before the last."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None
    completion_tokens_details: PredictionTokens | None = None


class TextLogprobs(AnswerFields):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class AlternativeToken(AnswerFields):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenToken(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class ChatLogprobs(AnswerFields):
    content: list[ChosenToken]
    refusal: None


class DraftedPart(AnswerFields):
    text: str
    drafter: str


class ChunkSpeculation(AnswerFields):
    """Who guessed a chunk's text, how many guesses were rejected, and which, where they may be shown."""

    token_ids: list[int]
    drafted_by: list[str]
    parts: list[DraftedPart]
    rejected: list[str]
    rejected_tokens: int
    drafter: str


class SpeculationStats(AnswerFields):
    rounds: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    drafter: str
    prefill_s: float
    decode_s: float
    preemptions: int
    seed: int


class SpeculationReport(AnswerFields):
    """A row for each choice, and seconds by stage of the steps that emitted for the answer."""

    choices: list[SpeculationStats]
    stage_seconds: dict[str, float]


class PromptLogprob(AnswerFields):
    """`rank` is known of the likeliest."""

    logprob: float | None
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt but the first, by ids, itself and the likeliest ones."""


class TextChoice(AnswerFields):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasons | None
    prompt_logprobs: PromptLogprobs | None = None
    speculation: ChunkSpeculation | None = None


class ModelAnswer(AnswerFields):
    """What every answer of the model has, whole or an event of a stream."""

    id: str
    created: int
    model: str
    usage: TokenUsage | None = None
    speculation: SpeculationReport | None = None
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None
    obfuscation: str | None = None


class TextAnswer(ModelAnswer):
    """An answer of /v1/completions: whole, and each event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class CalledFunction(AnswerFields):
    """In chunks the first piece of a call has its name."""

    name: str | None = None
    arguments: str


class ToolCallPart(AnswerFields):
    """A call, or in chunks a piece of one."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AnswerMessage(AnswerFields):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallPart] | None = None
    function_call: CalledFunction | None = None


class ChatChoice(AnswerFields):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasons


class ChatAnswer(ModelAnswer):
    """An answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None = None


class MessageDelta(AnswerFields):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    function_call: CalledFunction | None = None


class ChunkChoice(AnswerFields):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasons | None
    speculation: ChunkSpeculation | None = None


class ChatChunk(ModelAnswer):
    """Each event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class ResponseText(AnswerFields):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenToken]


class ResponseItem(AnswerFields):
    """A message, with `content`, or a call of a function, with the rest."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponseText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(AnswerFields):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """An answer of /v1/responses: what it has beside these repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    output: list[ResponseItem]
    usage: ResponseUsage | None = None
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None


class ResponseEvent(BaseModel):
    """An event of a streamed response; its `type` says what else it has."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    item: ResponseItem | None = None


class MessageBlock(AnswerFields):
    """A text, or a call with the rest."""

    type: Literal["text", "tool_use"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: dict[str, str] | None = None


class MessageUsage(AnswerFields):
    """The last three are a whole message's; what is null is told by Anthropic's server alone."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    output_tokens_details: None
    server_tool_use: None
    cache_creation: None = None
    inference_geo: None = None
    service_tier: None = None


class MessageAnswer(AnswerFields):
    """An answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None


class MessageEvent(AnswerFields):
    """An event of a streamed message; its `type` says what else it has."""

    type: str
    index: int | None = None
    message: MessageAnswer | None = None
    content_block: MessageBlock | None = None
    delta: dict[str, str | None] | None = None
    usage: MessageUsage | None = None
    warnings: list[str] | None = None
    receipts: list[dict[str, Any]] | None = None
    error: dict[str, str] | None = None
    request_id: str | None = None


class MessageErrorFields(AnswerFields):
    type: str
    message: str


class MessageError(AnswerFields):
    """Every answer below /v1/messages that is no success."""

    type: Literal["error"]
    error: MessageErrorFields
    request_id: str | None


class CountedTokens(AnswerFields):
    input_tokens: int


# ---- answers about the server ----------------------------------------------------------------------------------------


class ServedModel(AnswerFields):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["wager"]
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: int
    lifecycle: str


class ServedModels(AnswerFields):
    object: Literal["list"]
    data: list[ServedModel]
    first_id: str
    last_id: str
    has_more: bool


class TokenList(AnswerFields):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DecodedText(AnswerFields):
    prompt: str


class TokenizerInfo(AnswerFields):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class ServerHealth(AnswerFields):
    status: Literal["ok"]


class ServerVersion(AnswerFields):
    version: str


class LiveNumbers(BaseModel):
    """What the dashboard shows; it may grow."""

    model: str
    version: str
    drafts: dict[str, Any]


# ---- by path ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """What a path answers: a model, or None for what is no JSON, the model of its events, and that of its errors.
    `body`: that of what it takes (None: GET)."""

    answer: type[BaseModel] | None
    events: type[BaseModel] | None = None
    error: type[BaseModel] = ErrorAnswer
    body: type[BaseModel] | None = None
    kind: str = "application/json"

    @property
    def kinds(self) -> set[str]:
        """The media types of answers."""
        return {self.kind, "text/event-stream"} if self.events else {self.kind}

    def statuses(self, path: str) -> set[int]:
        """Those of answers, without failures of the server."""
        if self.body:
            return {200, 400, 401, 404, 408, 413, 415, 429, 431}
        return {200, 400, 401, 408, 431, *([404] if "{" in path else [])}

    @property
    def named_events(self) -> bool:
        """Whether its events have names, and nothing stands at their end."""
        return self.events in (ResponseEvent, MessageEvent)


ANSWERS: Mapping[str, Answers] = {
    "/v1/completions": Answers(TextAnswer, TextAnswer, body=CompletionBody),
    "/v1/chat/completions": Answers(ChatAnswer, ChatChunk, body=ChatBody),
    "/v1/responses": Answers(ResponseAnswer, ResponseEvent, body=ResponsesBody),
    "/v1/responses/{name}": Answers(ResponseAnswer),
    "/v1/messages": Answers(MessageAnswer, MessageEvent, MessageError, body=MessagesBody),
    "/v1/messages/count_tokens": Answers(CountedTokens, error=MessageError, body=TokenCountBody),
    "/tokenize": Answers(TokenList, body=TokenizeBody),
    "/detokenize": Answers(DecodedText, body=DetokenizeBody),
    "/tokenizer_info": Answers(TokenizerInfo),
    "/v1/models": Answers(ServedModels),
    "/v1/models/{name}": Answers(ServedModel),
    "/health": Answers(ServerHealth),
    "/version": Answers(ServerVersion),
    "/live": Answers(LiveNumbers),
    "/metrics": Answers(None, kind="text/plain"),
    "/": Answers(None, kind="text/html"),
}
