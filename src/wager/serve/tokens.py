"""/tokenize and /detokenize, with the fields of vLLM's."""

from __future__ import annotations

from typing import Any

from wager.async_llm import AsyncLLM
from wager.prompts import TextPart
from wager.serve.bodies import ChatBody, DetokenizeBody, TokenizeBody, parse
from wager.serve.errors import ApiError
from wager.serve.limits import check_characters
from wager.serve.tools import ChatTools
from wager.serve.work import BodyParser


class TokenConversion:
    """Texts and conversations to token ids as requests have them, and back."""

    def __init__(self, llm: AsyncLLM, bodies: BodyParser) -> None:
        self._llm, self._bodies = llm, bodies

    def encode(self, raw: bytes) -> dict[str, Any]:
        """The answer to a body of /tokenize."""
        body = parse(TokenizeBody, raw)
        self._bodies.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "There must be a prompt or messages.", "Send one of the two.", param="prompt")
        tokens = self._text(body) if body.prompt is not None else self._conversation(body)
        found: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._llm.engine.scheduler.max_context,
            "tokens": tokens,
        }
        if body.return_token_strs:
            found["token_strs"] = [self._llm.tokenizer.token(token) for token in tokens]
        return found

    def decode(self, raw: bytes) -> dict[str, Any]:
        """The answer to a body of /detokenize."""
        body = parse(DetokenizeBody, raw)
        self._bodies.check_model(body.model)
        vocab = self._llm.engine.runner.target.vocab
        wrong = next((token for token in body.tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ApiError(400, f"Token {wrong} is not in the vocabulary of {vocab}.", param="tokens")
        return {"prompt": self._llm.tokenizer.decode(body.tokens, special=True)}

    def _text(self, body: TokenizeBody) -> list[int]:
        for name in ("tools", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} goes with messages.", "Leave it out.", param=name)
        tokenizer, text = self._llm.tokenizer, body.prompt or ""
        check_characters(len(text), self._llm.engine.scheduler.max_context, "prompt")
        if body.add_special_tokens is False:
            return tokenizer.encode_parts([TextPart(text)])
        return tokenizer.encode_untrusted(text)

    def _conversation(self, body: TokenizeBody) -> list[int]:
        if body.add_special_tokens:
            raise ApiError(
                400, "The chat template writes the special tokens of a conversation.",
                "Leave add_special_tokens out.", param="add_special_tokens",
            )  # fmt: skip
        chat = ChatBody.model_validate({"messages": body.messages, "tools": body.tools})
        tools = ChatTools.of(chat, self._llm.tokenizer)
        whole = body.add_generation_prompt is not False
        return list(self._bodies.encode_messages(chat.messages, tools, add_generation_prompt=whole))
