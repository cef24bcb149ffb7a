"""Damaged model files: mutants with fixed numbers (`python dev/fuzz_files.py` goes on for hours), and headers that
contradict themselves or are out of range, as some are known to have gone wrong: each is refused by a typed error that
names file, key and value, before memory is taken.

A mutant that hangs ends the run by pytest's own limit, with its stack.
"""

from __future__ import annotations

import json
import logging
import shutil
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fuzz_models
import mutators as files
import numpy as np
import pytest
from examine import ANSWER, FAULT, MUTANTS, TYPED, examine, examine_mutant
from mutators import TEMPLATES
from safetensors.numpy import load_file, save_file

from wager.arch.config_keys import short_repr
from wager.errors import ModelError, TokenizerError
from wager.kernels.arrays import BFLOAT16
from wager.models import chat_template
from wager.models.gguf import GgufFile
from wager.models.opening import open_model
from wager.models.tokenizer import Tokenizer
from wager.models.weights import open_weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Undamaged they answer."""
    made = fuzz_models.build(tmp_path_factory.mktemp("fuzz") / "bases")
    assert {examine(path).outcome for path in made.values()} == {ANSWER}
    return made


@pytest.mark.parametrize(("kind", "share"), [("gguf", 20), *((kind, 1) for kind in MUTANTS)])
def test_damaged_files_end_in_an_answer_or_a_typed_error(
    kind: str, share: int, models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_WORK", 100_000)  # many templates do not end, and take seconds to find that out
    found = [(number, *examine_mutant(kind, number, models, tmp_path)) for number in range(MUTANTS[kind] // share)]
    assert [each for each in found if each[1].outcome == FAULT] == []
    outcomes = Counter(examined.outcome for _, examined, _ in found)
    if share == 1:
        assert outcomes[ANSWER] > 0, "mutants that are all refused test the refusal only"
        assert outcomes[TYPED] > outcomes[ANSWER] / 10


# ---- headers that contradict themselves or are out of range ----------------------------------------------------------

HUGE = 10**400


@pytest.fixture
def directory(models: Mapping[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a directory, one of its JSON files changed; a value None becomes null."""

    def copy(name: str = "llama", file: str = "config.json", **changes: Any) -> Path:
        path = tmp_path / name
        shutil.copytree(models[name], path)
        values = json.loads((path / file).read_text())
        text = json.dumps({**values, **changes}).replace('"1e400"', "1e400")
        (path / file).write_text(text)
        return path

    return copy


@pytest.fixture
def gguf(models: Mapping[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A GGUF file taken apart, changed and written again."""

    def write(change: Callable[[Any], None], name: str = "gguf") -> Path:
        parts = files.take_apart(models[name].read_bytes())
        change(parts)
        path = tmp_path / "changed.gguf"
        path.write_bytes(files.put_together(parts))
        return path

    return write


def set_key(key: str, kind: int, raw: bytes) -> Callable[[Any], None]:
    def change(parts: Any) -> None:
        parts.entries = [entry for entry in parts.entries if entry.key != key.encode()]
        parts.entries.append(files.Entry(key.encode(), kind, raw))

    return change


def tensor(**values: Any) -> Callable[[Any], None]:
    """Of the last tensor; `whole` of the file."""
    return lambda parts: vars(parts.infos[-1]).update(values)


def whole(**values: Any) -> Callable[[Any], None]:
    return lambda parts: vars(parts).update(values)


def number(key: str, code: str, value: float) -> Callable[[Any], None]:
    return set_key(key, {"I": 4, "f": 6, "B": 7, "q": 11, "d": 12}[code], struct.pack("<" + code, value))


def text(key: str, value: str) -> Callable[[Any], None]:
    return set_key(key, 8, files.string(value.encode()))


def array(key: str, kind: int, values: bytes, count: int) -> Callable[[Any], None]:
    return set_key(key, 9, struct.pack("<IQ", kind, count) + values)


# ---- config.json ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [288, -1, "x", True, [[1]], [1, "a"], HUGE, float("nan")], ids=short_repr)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_eos_ids_must_be_ids_of_the_vocabulary(file: str, value: Any, directory: Callable[..., Path]) -> None:
    path = directory("llama", file, eos_token_id=value)
    with pytest.raises(TokenizerError, match=rf"eos_token_id = .*{file}.* from 0 to 287"):
        open_model(str(path))


LLAMA3 = fuzz_models.CONFIGS["llama"]["rope_scaling"]
QWEN3 = {**fuzz_models.CONFIGS["qwen3"], "rope_scaling": None}
YARN = QWEN3["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [[1]]}, "layer_types in "),
        ({"rope_scaling": "a"}, "rope_scaling = "),
        ({**QWEN3, "sliding_window": 8 * 10**9}, "sliding_window = 8000000000 in .* larger"),  # beyond 32 bits
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling.factor = '8'"),
        ({"rope_scaling": {**LLAMA3, "factor": HUGE}}, "rope_scaling.factor = 1000"),
        ({"rope_scaling": {**LLAMA3, "factor": "1e400"}}, "rope_scaling.factor = inf"),
        ({"rope_scaling": {**LLAMA3, "factor": float("nan")}}, "rope_scaling.factor = nan"),
        ({"rope_scaling": {**LLAMA3, "rope_type": ["yarn"]}}, "rope_scaling.rope_type = "),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "rope_scaling.truncate = 'no'"),
        ({"rope_scaling": {**YARN, "rope_theta": 1}}, "theta = 1.* above 1"),
        ({"rope_theta": HUGE}, "rope_theta = 1000"),
        ({"num_attention_heads": 128, "head_dim": None}, "hidden_size = 64 .* too small for 128 heads"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps = 1e"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ({"text_config": [1]}, "text_config = "),
        ({"architectures": "LlamaForCausalLM"}, "architectures = "),
        ({"num_nextn_predict_layers": HUGE}, "num_nextn_predict_layers = 1000"),
        ({"hidden_act": {"a": "x" * 9000}}, "hidden_act = "),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str, directory: Callable[..., Path]) -> None:
    path = directory("llama", **{"rope_parameters": None, **changes})
    with pytest.raises(ModelError, match=message) as caught:
        open_weights(path)
    assert len(caught.value.message) < 600


# ---- GGUF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (number("llama.attention.sliding_window", "q", 8 * 10**9), "sliding_window = 8000000000 in .* larger"),
        (number("general.alignment", "I", 24), "general.alignment = 24"),
        (text("split.count", "two"), "split.count = 'two'"),
        (array("general.architecture", 4, b"\0" * 8, 2), r"general.architecture = \[0, 0\]"),
        (number("tokenizer.ggml.tokens", "I", 3), "tokenizer.ggml.tokens = 3"),
        (number("tokenizer.ggml.token_type", "f", 3.0), "tokenizer.ggml.token_type = 3.0"),
        (array("tokenizer.ggml.token_type", 5, struct.pack("<2i", 1, 1), 2), "2 types for 288 tokens"),
        (array("tokenizer.ggml.token_type", 5, struct.pack("<288i", *[9] * 288), 288), "token_type = "),
        (number("tokenizer.ggml.merges", "I", 3), "tokenizer.ggml.merges = 3"),
        (number("tokenizer.chat_template", "I", 3), "tokenizer.chat_template = 3"),
        (number("tokenizer.ggml.add_bos_token", "f", 0.5), "tokenizer.ggml.add_bos_token = 0.5"),
        (number("tokenizer.ggml.eos_token_id", "I", 288), "eos_token_id = 288 .* from 0 to 287"),
        (number("tokenizer.ggml.bos_token_id", "I", 2**32 - 1), "bos_token_id = 4294967295"),
        (array("tokenizer.ggml.merges", 8, files.string(b"zz qq"), 1), "out of vocabulary"),
        (number("llama.rope.freq_base", "f", 1.0), "llama.rope.freq_base = 1.0 .* above 1"),
        (number("llama.rope.freq_base", "f", float("inf")), "llama.rope.freq_base = inf"),
        (text("llama.rope.scaling.factor", "4"), "llama.rope.scaling.factor = '4'"),
        (number("llama.rope.scaling.attn_factor", "d", 1e300), "llama.rope.scaling.attn_factor = 1e"),
        (number("llama.attention.head_count", "I", 0), "llama.attention.head_count = 0"),
        (number("llama.block_count", "q", -1), "llama.block_count = -1"),
    ],
)
def test_metadata_out_of_range(change: Callable[[Any], None], message: str, gguf: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=message):
        open_model(str(gguf(change)))


def test_scores_that_are_no_numbers(gguf: Callable[..., Path], models: Mapping[str, Path]) -> None:
    tokens = len(GgufFile(models["gguf-sentencepiece"]).metadata["tokenizer.ggml.tokens"])
    scores = array("tokenizer.ggml.scores", 6, struct.pack(f"<{tokens}f", *[float("nan")] * tokens), tokens)
    with pytest.raises(TokenizerError, match=r"tokenizer.ggml.scores = .* finite"):
        open_model(str(gguf(scores, "gguf-sentencepiece")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.entries.append(parts.entries[3]), "twice"),
        (tensor(name=b"blk.0.attn_q.weight"), "twice"),
        (tensor(offset=0), "begins at byte"),
        (tensor(name=b"\xff"), "no UTF-8"),
        (tensor(dims=[2] * 100), "100 dimensions"),
        (tensor(dims=[]), "0 dimensions"),
        (tensor(dims=[0]), "cannot store"),
        (tensor(dims=[2**32, 2**32]), "truncated"),
        (whole(more_entries=2**62), "truncated"),
        (whole(more_infos=2**62), "truncated"),
        (array("tokenizer.ggml.tokens", 8, b"", 2**40), "truncated"),
        (array("tokenizer.ggml.scores", 6, b"", 2**61), "truncated"),
        (array("tokenizer.ggml.tokens", 8, struct.pack("<Q", 2**64 - 1) + b"a" * 64, 1), "truncated"),
    ],
)
def test_directories_that_lie_cost_nothing(
    change: Callable[[Any], None], message: str, gguf: Callable[..., Path]
) -> None:
    path = gguf(change)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - began < 20
    assert path.name in caught.value.message


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("qwen3", float("nan")), ("llama", float("-inf"))])
def test_weights_that_are_no_numbers(name: str, value: float, directory: Callable[..., Path]) -> None:
    path = directory(name)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, path / "model.safetensors")
    weights = open_weights(path)
    weights.read("layers.0.up.weight")
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight in .* no finite numbers"):
        weights.read("layers.1.up.weight", BFLOAT16)


def test_messages_about_tensors_are_short(directory: Callable[..., Path]) -> None:
    """Found by the mutant safetensors 7000000462."""
    path = directory("llama")
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "x" * 5000: np.zeros(1, np.float32)}, file)
    with pytest.raises(ModelError, match="has a tensor xxx") as caught:
        open_weights(path)
    assert len(caught.value.message) < 1000
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="cannot be read") as caught:
        open_weights(path)
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1e7, float("-inf")])
def test_stored_rope_factors_out_of_range(value: float, gguf: Callable[..., Path]) -> None:
    def change(parts: Any) -> None:
        parts.data += b"\0" * (-len(parts.data) % 32)
        parts.infos.append(files.Info(b"rope_freqs.weight", [8], 0, len(parts.data)))
        parts.data += struct.pack("<8f", *[1.0] * 7, value)

    with pytest.raises(ModelError, match=r"rope_freqs.weight in .* from 1e-6 to 1e6"):
        open_weights(gguf(change))


# ---- what is not used -----------------------------------------------------------------------------------------------


def test_ids_that_are_not_used_are_warned_of(
    directory: Callable[..., Path], gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    key = "tokenizer.ggml.eot_token_id"
    files = {"bos_token_id": directory("llama", "generation_config.json", bos_token_id=-1)}
    files[key] = gguf(number(key, "I", 10**6))
    with caplog.at_level(logging.WARNING, logger="wager"):
        assert [Tokenizer.load(path).eos_ids for path in files.values()] == [(1,), (1,)]
    for record, named in zip(caplog.records, (f"bos_token_id = -1 in {files['bos_token_id']}", key), strict=True):
        assert named in record.getMessage()


def test_keys_that_nobody_reads_change_no_token(
    models: Mapping[str, Path], gguf: Callable[..., Path], directory: Callable[..., Path]
) -> None:
    nested = {"a": [float("nan"), HUGE, {"b": None}]}
    assert examine(directory("llama", unknown=nested, use_cache="maybe")) == examine(models["llama"])
    assert examine(gguf(array("other.list", 6, b"\xff" * 400, 100))) == examine(models["gguf"])


# ---- chat templates ------------------------------------------------------------------------------------------------


ENDLESS = (
    *TEMPLATES[:12],
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set t = 'xa' * 500000 %}{% for i in range(99) %}{% set y = t.split('a') %}{% endfor %}",
)


@pytest.mark.parametrize("template", ENDLESS)
def test_templates_that_do_not_end(template: str, directory: Callable[..., Path]) -> None:
    path = directory("llama")
    (path / "chat_template.jinja").write_text(template)
    tokenizer, began = Tokenizer.load(path), time.process_time()
    with pytest.raises(TokenizerError, match="chat template"):
        tokenizer.chat(fuzz_models.MESSAGES)
    assert time.process_time() - began < 20


def test_limits_leave_the_loops_of_a_template_alone(directory: Callable[..., Path]) -> None:
    path = directory("llama")
    (path / "chat_template.jinja").write_text(
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.index }}/{{ loop.length }}"
        "{{ '.' if loop.last else ',' }}{% endfor %}{{ '=' * 3 }}{{ 7 % 4 }}{{ '%s!' % 'x' }}{{ 2 ** 5 }}"
        "{% for k, v in {'a': 1} | items %}{{ k ~ v }}{% endfor %}{% for x in 'abc' if x != 'b' %}{{ x }}{% endfor %}"
    )
    text = Tokenizer.load(path).chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert text == "1/2,2/2.===3x!32a1ac"


def test_limits_leave_long_chats_alone(directory: Callable[..., Path]) -> None:
    path = directory("llama")
    (path / "chat_template.jinja").write_text(
        "{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ m.content ~ '|' %}{% endfor %}{{ n.t }}"
    )
    messages = [{"role": "user", "content": "a" * 200}] * 2000
    assert Tokenizer.load(path).chat(messages) == ("a" * 200 + "|") * 2000
