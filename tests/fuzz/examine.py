"""What becomes of a model's files as production opens them: an answer, a typed error, or a fault of the engine."""

from __future__ import annotations

import json
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fuzz_models import MESSAGES, PROMPT

from wager.arch.config_keys import read_json
from wager.arch.gguf_config import gguf_precision, read_gguf
from wager.arch.hf_config import read_config
from wager.arch.spec import ModelSpec
from wager.errors import CacheIntegrityError, WagerError
from wager.llm import LLM
from wager.models.gguf import open_gguf
from wager.types import SamplingParams

_LARGEST_LOGPROB = 1e-3
"""A log-probability is at most 0, up to rounding."""
TYPED, ANSWER, FAULT = "typed error", "answer", "fault"


@dataclass(frozen=True)
class Examined:
    """`outcome` is one of TYPED, ANSWER, FAULT; `detail` the error's type and text, or the token ids."""

    outcome: str
    detail: str


def examine(path: Path) -> Examined:
    """Open the model, encode, decode and render with its tokenizer, and generate a few tokens."""
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error", RuntimeWarning)  # overflow and invalid numbers inside numpy
        return _examine(path)


def _examine(path: Path) -> Examined:
    try:
        return _shape(path) or (Examined(ANSWER, "") if path.suffix == ".json" else _answer(path))
    except CacheIntegrityError as error:  # by definition a defect
        return Examined(FAULT, f"{type(error).__name__}: {error}")
    except WagerError as error:
        if not error.message.strip() or "\n" in error.message.strip() or len(error.message) > 1000:
            return Examined(
                FAULT, f"a message that is empty or very long: {type(error).__name__}: {str(error)[:300]!r}"
            )
        return Examined(TYPED, f"{type(error).__name__}: {error.message}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return Examined(FAULT, f"{type(error).__name__}: {str(error)[:300]} {_place(error)}")


def _answer(path: Path) -> Examined:
    with LLM(str(path), drafter="none", max_rows=32, max_sequences=2, cache_tokens=256, threads=1) as llm:
        tokenizer, vocab = llm.tokenizer, llm.engine.spec.vocab
        ids = tokenizer.encode(PROMPT)
        tokenizer.decode(range(min(tokenizer.vocab_size, 1000)), special=True)
        text = tokenizer.decode(ids)
        params = SamplingParams(max_tokens=3, logprobs=2)
        done = llm.generate(PROMPT, params)
        answers = [done, llm.chat(MESSAGES, params)] if tokenizer.chat_template is not None else [done]
    for answer in answers:
        if answer.finish_reason == "error":
            return Examined(TYPED, f"NumericsError: {answer.error}")
        for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True):
            if not 0 <= token < vocab:
                return Examined(FAULT, f"token {token} of a vocabulary of {vocab}")
            if not math.isfinite(chosen.logprob) or chosen.logprob > _LARGEST_LOGPROB:
                return Examined(FAULT, f"log-probability {chosen.logprob}")
    if any(not 0 <= token < vocab for token in tokenizer.eos_ids):
        return Examined(FAULT, f"eos ids {tokenizer.eos_ids} of a vocabulary of {vocab}")
    return Examined(ANSWER, f"{[answer.token_ids for answer in answers]} {text[:40]!r}")


def _shape(path: Path) -> Examined | None:
    """The figures that `wager plan` computes from the same files must be finite; None if they are."""
    if path.suffix == ".gguf":
        file = open_gguf(path)
        spec = read_gguf(file.metadata, file.shapes, precision=gguf_precision(file.sizes))
    else:
        spec = read_config(read_json(path if path.suffix == ".json" else path / "config.json"))
    figures = _figures(spec)
    if all(math.isfinite(figure) and figure > 0 for figure in figures):
        json.dumps([spec.name, *figures])
        return None
    return Examined(FAULT, f"figures {figures}")


def _figures(spec: ModelSpec) -> list[float]:
    streams = [stream for layer in spec.layers for stream in layer.attention.streams(100.0, 2.0, spec.precision)]
    sizes = [spec.parameters, spec.active, spec.resident_bytes, spec.streamed_bytes, spec.kv_bytes(spec.context)]
    return [*map(float, sizes), *(float(stream.flops) for stream in streams)]


def _place(error: BaseException) -> str:
    """File and line of the innermost frame of the package."""
    place, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        place = f"{name.rpartition('/wager/')[2]}:{trace.tb_lineno}" if "/wager/" in name else place
        trace = trace.tb_next
    return f"at {place}"


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(examine(Path(given)))  # noqa: T201
