"""What a request must fit into."""

from __future__ import annotations

from wager.errors import RequestError
from wager.kernels.base import BLOCK_SIZE
from wager.types import Request


def check_length(request: Request, *, max_context: int, num_blocks: int, answered: bool = True) -> None:
    """RequestError if a request could never fit, even alone; one that is not `answered` is its prompt alone."""
    prompt_tokens = len(request.prompt)
    need = min(prompt_tokens + request.params.max_tokens, max_context)
    if prompt_tokens + answered > max_context:
        reserved = ", at least one of them for the answer" if answered else ""
        raise RequestError(
            f"Request {request.id!r} has {prompt_tokens} prompt tokens: the prompt is too long, as this model's "
            f"maximum context length is {max_context} tokens{reserved}.",  # read by clients
            "Shorten the prompt, or raise --max-context if the model allows it.",
            field="prompt",
        )
    if need > num_blocks * BLOCK_SIZE:
        raise RequestError(
            f"Request {request.id!r} may grow to {need} tokens; the cache holds {num_blocks * BLOCK_SIZE}.",
            "Lower max_tokens, shorten the prompt, or give the cache more memory (--memory).",
            field="max_tokens",
        )


def check_request(request: Request, *, vocab: int, has_tokenizer: bool) -> None:
    """RequestError if a request has no proper names, names tokens that are not below `vocab`, or needs a tokenizer that
    is not there."""
    for field, text in (("id", request.id), ("tenant", request.tenant)):
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise RequestError(f"A request's {field} is {text!r}.", "Give a string that UTF-8 can hold.") from None
    if "#" in request.id:
        raise RequestError(f"Request id {request.id!r} contains '#', which numbers choices.", "Leave it out.")
    grammar, prediction = request.params.grammar, request.params.prediction
    if isinstance(prediction, str):
        raise RequestError("A predicted text needs a tokenizer; this engine has none.", "Give its token ids.")
    for field, tokens, hint in (
        ("prompt", request.prompt, "Encode the prompt with the target's own tokenizer."),
        ("logit_bias", request.params.logit_bias, "Leave it out of logit_bias."),
        ("stop_token_ids", request.params.stop_token_ids, "Leave it out of stop_token_ids."),
        ("prediction", prediction, "Encode it with the target's own tokenizer."),
        ("grammar", grammar and grammar.token_ids, "Encode the text with the target's own tokenizer."),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            wrong = next(token for token in tokens if not 0 <= token < vocab)
            name = "" if field == "prompt" else f" under {field}"
            raise RequestError(
                f"Request {request.id!r} names token {wrong}{name}; the vocabulary has ids 0 to {vocab - 1}.",
                hint,
                field=field,
            )
    if request.params.stop and not has_tokenizer:
        raise RequestError("Stop strings need a tokenizer; this engine has none.", "Use stop_token_ids instead.")
