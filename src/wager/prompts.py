"""What users give a model: texts, token ids and conversations; what is none of these is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from wager.errors import UsageError
from wager.types import as_token_ids, listed

Message = Mapping[str, Any]
"""A chat message: {"role": "system" | "user" | "assistant", "content": text}."""

Prompt = str | Sequence[int]
"""A text, encoded as it is (no chat template, control tokens in it are parsed), or its token ids: integers of any type,
arrays and tensors included."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of a prompt. Control tokens written out in it are parsed as such only if `parse_special`."""

    text: str
    parse_special: bool = False


class ChatTokenizer(Protocol):
    """The methods of a tokenizer by which prompts are encoded."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def chat_parts(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[TextPart]: ...

    def encode_parts(self, parts: Iterable[TextPart], /) -> list[int]: ...


def encode_chat(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a conversation in the model's chat template, up to the position where the answer begins.

    Control tokens come from the template alone: text of messages that spells one is encoded as ordinary text.
    """
    return tuple(tokenizer.encode_parts(tokenizer.chat_parts(messages, add_generation_prompt=True)))


def encode_prompts(tokenizer: ChatTokenizer, prompts: object) -> tuple[list[tuple[int, ...]], bool]:
    """Token ids of one prompt or of several, and whether it was one. UsageError that names what is neither."""
    given = listed(prompts)
    if isinstance(given, bytes | bytearray | memoryview) or not isinstance(given, Sequence):
        raise not_a_prompt(prompts)
    if isinstance(given, str) or (given and isinstance(listed(given[0]), int | float)):
        return [encode_prompt(tokenizer, given)], True
    return [encode_prompt(tokenizer, prompt) for prompt in given], False


def encode_chats(tokenizer: ChatTokenizer, messages: object) -> tuple[list[tuple[int, ...]], bool]:
    """The same for one conversation or several."""
    several = isinstance(messages, Sequence) and not isinstance(messages, str)
    one = not several or (bool(messages) and isinstance(messages[0], Mapping))  # type: ignore[index]
    conversations: Sequence[Any] = [messages] if one else messages  # type: ignore[assignment]
    for conversation in conversations:
        check_conversation(conversation)
    return [encode_chat(tokenizer, turns) for turns in conversations], one


def check_conversation(messages: object) -> None:
    """UsageError unless it is a list of messages, each with a role and a content."""
    if not is_conversation(messages):
        raise UsageError(
            f"A conversation of type {type(messages).__name__} cannot be answered.",
            'A conversation is a list of messages such as {"role": "user", "content": "Hello"}; texts go to generate.',
        )
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise UsageError(
                    f"Message {number} of the conversation has no text under {key!r}.",
                    'A message is a mapping such as {"role": "user", "content": "Hello"}.',
                )


def not_a_prompt(value: object, reason: str = "") -> UsageError:
    """The refusal of a value that is no prompt."""
    return UsageError(
        f"A prompt of type {type(value).__name__} cannot be answered{': ' if reason else ''}{reason}.",
        "A prompt is a text or a sequence of token ids; conversations go to chat.",
    )


def encode_prompt(tokenizer: ChatTokenizer, prompt: object) -> tuple[int, ...]:
    """Token ids of a prompt: a text's, or those given. UsageError that names what is neither."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    try:
        return as_token_ids(prompt)
    except TypeError as error:
        raise not_a_prompt(prompt, str(error)) from None


def is_conversation(value: object) -> TypeGuard[Sequence[Message]]:
    """Whether it is one conversation rather than a list of them, or a prompt."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)
