"""An answer as blocks, of text and of calls: how the Responses API and Anthropic's Messages write it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from wager.constrain.tools import TextDelta, ToolCallDelta, ToolCallParser, ToolFormat
from wager.engine.outputs import TokenDecoder
from wager.serve.formats import encoded, new_call_id
from wager.types import Completion, OutputDelta, TokenLogprob


@dataclass
class AnswerBlock:
    """A text, or a call of the function `name`, whose arguments are the text. `id` names the call."""

    index: int
    name: str | None
    id: str
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as an object: an empty one where they were cut off."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class BlockChange(NamedTuple):
    """What a piece of an answer does to a block: it begins, grows by a text, or ends, `cut` by a limit or complete."""

    kind: Literal["begin", "grow", "end"]
    block: AnswerBlock
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    cut: bool = False


class BlockReader:
    """Reads the deltas of one choice. `blocks` are those that have begun; the last one is open until the end.
    `token_text` gives the text that each token adds; it is needed where log-probabilities are told: a text has those
    of its own tokens, however its deltas are cut."""

    def __init__(self, calls: ToolFormat | None, token_text: TokenDecoder | None = None) -> None:
        self._parser = None if calls is None else ToolCallParser(calls)
        self._token_text = token_text
        self._characters = self._read = 0  # of the tokens so far, and of their text
        self._tokens: deque[tuple[int, int, TokenLogprob]] = deque()  # characters before and behind each, not told yet
        self.blocks: list[AnswerBlock] = []

    @property
    def called(self) -> bool:
        return any(block.name is not None for block in self.blocks)

    def push(self, delta: OutputDelta | Completion) -> Iterator[BlockChange]:
        """What a delta, or a whole choice, changes."""
        last = delta.finish_reason is not None
        if self._token_text is not None:
            for item in delta.logprobs:
                before = self._characters
                self._characters += len(self._token_text.push(item.token_id))
                self._tokens.append((before, self._characters, item))
        if self._parser is None:
            yield from self._text(TextDelta(delta.text, self._read))
            self._read += len(delta.text)
        else:
            for part in self._parser.push(delta.text, last=last):
                yield from self._text(part) if isinstance(part, TextDelta) else self._call(part)
        if last:
            if not self.blocks:
                yield from self._begin(None)
            if self._tokens and self.blocks[-1].name is None:  # tokens without text, as the one that ends an answer
                yield self._grow("", [item for _, _, item in self._tokens])
            yield BlockChange("end", self.blocks[-1], cut=delta.finish_reason == "length")

    def _text(self, part: TextDelta) -> Iterator[BlockChange]:
        if not part.text:
            return
        if not self.blocks or self.blocks[-1].name is not None:
            yield from self._begin(None)
        told = list[TokenLogprob]()
        while self._tokens and self._tokens[0][0] < part.begin + len(part.text):
            before, behind, item = self._tokens.popleft()
            if max(behind, before + 1) > part.begin:  # one of no character may be a part of the next
                told.append(item)
        yield self._grow(part.text, told)

    def _grow(self, text: str, logprobs: Sequence[TokenLogprob]) -> BlockChange:
        self.blocks[-1].text += text
        self.blocks[-1].logprobs += logprobs
        return BlockChange("grow", self.blocks[-1], text, logprobs)

    def _call(self, call: ToolCallDelta) -> Iterator[BlockChange]:
        if call.name is not None:
            yield from self._begin(call.name)
        if call.arguments:
            self.blocks[-1].text += call.arguments
            yield BlockChange("grow", self.blocks[-1], call.arguments)

    def _begin(self, name: str | None) -> Iterator[BlockChange]:
        if self.blocks:
            yield BlockChange("end", self.blocks[-1])
        self.blocks.append(AnswerBlock(len(self.blocks), name, new_call_id()))
        yield BlockChange("begin", self.blocks[-1])


def as_message(blocks: Sequence[AnswerBlock]) -> dict[str, Any]:
    """An answer as a message of a conversation."""
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
        for block in blocks
        if block.name is not None
    ]
    text = "".join(block.text for block in blocks if block.name is None)
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def named_event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event whose name is its type."""
    return f"event: {value['type']}\ndata: ".encode() + encoded(value) + b"\n\n"
