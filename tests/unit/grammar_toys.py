"""A small vocabulary for grammars on the toy target: JSON's characters, and tokens of several of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wager.constrain.compiler import GrammarCompiler
from wager.errors import NumericsError
from wager.testing import ToyDistribution
from wager.types import Grammar, Request
from wager.verify.distribution import History, process

EOS, CONTROL = 3, 0
_SINGLE = '{}":,[] abcdenrstulfmo01234-'
_LONGER = ['{"', '": ', '": "', '", "', '"}', "name", "true", "ab", "rue", "ame", ', "', "aa", "bc"]
TOKENS: list[bytes] = [
    b"<|control|>",
    b"x",
    b"y",
    b"<|end|>",
    *(c.encode() for c in _SINGLE),
    *(t.encode() for t in _LONGER),
]
VOCAB = len(TOKENS) + 2
"""Two ids more than the tokenizer has, as padded models have them."""

LAW = ToyDistribution(vocab=VOCAB, order=2, sharpness=6.0, eos=EOS, eos_bias=-1.0)


class ToyTokenizer:
    """The longest tokens first."""

    vocab_size = len(TOKENS)
    eos_ids = (EOS,)

    def token_bytes(self, token_id: int, /) -> bytes:
        return TOKENS[token_id]

    def is_control(self, token_id: int, /) -> bool:
        return token_id in (CONTROL, EOS)

    def encode_text(self, text: str, /) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            matching = [i for i, token in enumerate(TOKENS) if rest.startswith(token)]
            found = max(matching, key=lambda i: len(TOKENS[i]), default=None)
            ids += [] if found is None else [found]  # what cannot be written is left out
            rest = rest[1 if found is None else len(TOKENS[found]) :]
        return ids


COMPILER = GrammarCompiler(ToyTokenizer())


def text_of(tokens: Sequence[int]) -> str:
    """The text of an output without its end."""
    return b"".join(TOKENS[token] for token in tokens if token != EOS).decode()


def plain_text(request: Request, choice: int = 0) -> tuple[int, ...]:
    """The output straight from the closed form, with a fresh grammar at every token: no engine, no cache, no memory."""
    grammar, params, out = request.params.grammar, request.params, list[int]()
    assert grammar is not None
    while len(out) < params.max_tokens:
        compiled = COMPILER.compile(grammar).compiled
        assert compiled is not None
        history = History(request.prompt, out, grammar=compiled.start())
        try:
            shaped = process(LAW([*request.prompt, *out]), params, history)
        except NumericsError:
            break
        out.append(shaped.choose(params.seed or 0, len(request.prompt) + len(out), choice))
        state = compiled.start()
        state.append(out)
        if out[-1] == EOS or state.complete():
            break
    return tuple(out)


def allowed_ids(grammar: Grammar, out: Sequence[int]) -> np.ndarray:
    """What a fresh grammar allows after an output."""
    compiled = COMPILER.compile(grammar).compiled
    assert compiled is not None
    state = compiled.start()
    state.append(list(out))
    allowed = state.allowed(())
    assert allowed is not None
    return allowed.ids(VOCAB)
