"""/tokenize and /detokenize, with the fields of vLLM's."""

from __future__ import annotations

from typing import Any

from wager.prompts import TextPart
from wager.serve.bodies import ChatBody, DetokenizeBody, TokenizeBody, parse
from wager.serve.errors import ApiError
from wager.serve.formats import encoded
from wager.serve.tools import ChatTools
from wager.serve.work import BodyParser, check_model


class TokenConversion:
    """Texts and conversations to token ids as requests have them, and back. Answers are JSON in UTF-8."""

    def __init__(self, bodies: BodyParser) -> None:
        self._bodies, self._model = bodies, bodies.model

    def encode(self, raw: bytes) -> bytes:
        """The answer to a body of /tokenize."""
        body = parse(TokenizeBody, raw)
        check_model(body.model, self._model.name)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "There must be a prompt or messages.", "Send one of the two.", param="prompt")
        tokens = self._text(body) if body.prompt is not None else self._conversation(body)
        found: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._model.max_context,
            "tokens": tokens,
        }
        if body.return_token_strs:
            found["token_strs"] = [self._model.tokenizer.token(token) for token in tokens]
        return encoded(found)

    def decode(self, raw: bytes) -> bytes:
        """The answer to a body of /detokenize."""
        body = parse(DetokenizeBody, raw)
        check_model(body.model, self._model.name)
        vocab = self._model.vocab
        wrong = next((token for token in body.tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ApiError(400, f"Token {wrong} is not in the vocabulary of {vocab}.", param="tokens")
        return encoded({"prompt": self._model.tokenizer.decode(body.tokens, special=True)})

    def _text(self, body: TokenizeBody) -> list[int]:
        for name in ("tools", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} goes with messages.", "Leave it out.", param=name)
        text = body.prompt or ""
        if body.add_special_tokens is not False:
            return self._bodies.encode_text(text)
        self._bodies.check_characters(len(text), "prompt")
        return self._model.tokenizer.encode_parts([TextPart(text)])

    def _conversation(self, body: TokenizeBody) -> list[int]:
        if body.add_special_tokens:
            raise ApiError(
                400,
                "The chat template writes the special tokens of a conversation.",
                "Leave add_special_tokens out.",
                param="add_special_tokens",
            )
        chat = ChatBody.model_validate({"messages": body.messages, "tools": body.tools})
        tools = ChatTools.of(chat, self._model.tokenizer)
        whole = body.add_generation_prompt is not False
        return self._bodies.encode_messages(chat.messages, tools, add_generation_prompt=whole)
