"""What becomes of a model's files as production opens them: an answer, a typed error, or a fault of the engine."""

from __future__ import annotations

import json
import math
import random
import shutil
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import fuzz_models
import numpy as np
from fuzz_models import MESSAGES, PROMPT
from mutators import mutate_gguf, mutate_json, mutate_safetensors, mutate_template

from wager.arch.config_keys import read_json
from wager.arch.families import FAMILIES
from wager.arch.gguf_config import gguf_precision, read_gguf
from wager.arch.hf_config import read_config
from wager.arch.spec import ModelSpec
from wager.errors import CacheIntegrityError, WagerError
from wager.llm import LLM
from wager.models.gguf import open_gguf
from wager.models.weights import num_parameters
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
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
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
    sizes = [num_parameters(spec), spec.active, spec.resident_bytes, spec.streamed_bytes, spec.kv_bytes(spec.context)]
    return [*map(float, sizes), *(float(stream.flops) for stream in streams)]


def _place(error: BaseException) -> str:
    """File and line of the innermost frame of the package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/wager/" in frame.filename]
    return f"at {frames[-1].filename.rpartition('/wager/')[2]}:{frames[-1].lineno}" if frames else ""


# ---- mutants by number -----------------------------------------------------------------------------------------------

MUTANTS = {"gguf": 400, "safetensors": 250, "config": 400, "shape": 400, "tokenizer": 250, "template": 150}
"""How many of each kind the tests open."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def make(kind: str, number: int, models: Mapping[str, Path], folder: Path) -> tuple[Path, str]:
    """Writes the mutant into `folder`: the path of its model, and what was done."""
    rng = random.Random(f"{kind} {number}")
    if kind == "gguf":
        name = rng.choice(("gguf", "gguf-sentencepiece"))
        raw, done = mutate_gguf(models[name].read_bytes(), rng)
        path = folder / f"{kind}-{number}.gguf"
        path.write_bytes(raw)
        return path, f"{name}: {done}"
    if kind == "shape":
        values = {**fuzz_models.SHAPE, "model_type": rng.choice(tuple(FAMILIES))}
        text, done = mutate_json(json.dumps(values), "config.json", rng)
        path = folder / f"{kind}-{number}.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return path, f"{values['model_type']}: {done}"
    name = rng.choice(tuple(fuzz_models.CONFIGS)) if kind in ("config", "safetensors") else "qwen3"
    path = folder / f"{kind}-{number}"
    shutil.copytree(models[name], path)
    if kind == "safetensors":
        raw, done = mutate_safetensors((path / "model.safetensors").read_bytes(), rng)
        (path / "model.safetensors").write_bytes(raw)
        return path, f"{name}: {done}"
    if kind == "template":
        text, done = mutate_template(fuzz_models.TEMPLATE, rng)
        (path / "chat_template.jinja").write_bytes(text.encode("utf-8", "surrogatepass"))
        return path, f"{name}: {done} {text[:80]!r}"
    file = path / ("config.json" if kind == "config" else rng.choice(_TOKENIZER_FILES))
    text, done = mutate_json(file.read_text(encoding="utf-8"), file.name, rng)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path, f"{name}: {file.name}: {done}"


def examine_mutant(kind: str, number: int, models: Mapping[str, Path], folder: Path) -> tuple[Examined, str]:
    """What becomes of a mutant, and what was done to make it. Its files stay in `folder` if that is a fault."""
    path, done = make(kind, number, models, folder)
    found = examine(path)
    if found.outcome != FAULT:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found, done
