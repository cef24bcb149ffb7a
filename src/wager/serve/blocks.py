"""An answer as blocks, of text and of calls: how the Responses API and Anthropic's Messages write it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from wager.constrain.tools import ToolCallDelta, ToolCallParser, ToolFormat
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
    """Reads the deltas of one choice. `blocks` are those that have begun; the last one is open until the end."""

    def __init__(self, calls: ToolFormat | None) -> None:
        self._parser = None if calls is None else ToolCallParser(calls)
        self._logprobs: list[TokenLogprob] = []
        self.blocks: list[AnswerBlock] = []

    @property
    def called(self) -> bool:
        return any(block.name is not None for block in self.blocks)

    def push(self, delta: OutputDelta | Completion) -> Iterator[BlockChange]:
        """What a delta, or a whole choice, changes."""
        last = delta.finish_reason is not None
        self._logprobs += delta.logprobs
        if self._parser is None:
            yield from self._text(delta.text)
        else:
            for part in self._parser.push(delta.text, last=last).parts:
                yield from self._text(part) if isinstance(part, str) else self._call(part)
        if last:
            if not self.blocks:
                yield from self._begin(None)
            yield BlockChange("end", self.blocks[-1], cut=delta.finish_reason == "length")

    def _text(self, text: str) -> Iterator[BlockChange]:
        if not text:
            return
        if not self.blocks or self.blocks[-1].name is not None:
            yield from self._begin(None)
        block, logprobs = self.blocks[-1], self._logprobs
        self._logprobs = []
        block.text += text
        block.logprobs += logprobs
        yield BlockChange("grow", block, text, logprobs)

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
