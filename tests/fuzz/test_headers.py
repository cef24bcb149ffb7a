"""Headers that contradict themselves or are out of range: each refused by a typed error that names file, key and value,
before memory is taken. The mutants of test_files.py are drawn; these are the ones that are known to have gone wrong."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import binary_mutators as files
import fuzz_models
import numpy as np
import pytest
from examine import examine
from safetensors.numpy import load_file, save_file

from wager.arch.config_keys import ConfigKeys, read_json, short_repr
from wager.errors import ModelError, TokenizerError
from wager.kernels.arrays import BFLOAT16
from wager.models.gguf import GgufFile
from wager.models.opening import open_model
from wager.models.tokenizer import Tokenizer
from wager.models.weights import open_weights

HUGE = 10**400


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return fuzz_models.build(tmp_path_factory.mktemp("bases"))


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


def number(key: str, code: str, value: float) -> Callable[[Any], None]:
    return set_key(key, {"I": 4, "f": 6, "B": 7, "q": 11, "d": 12}[code], struct.pack("<" + code, value))


def text(key: str, value: str) -> Callable[[Any], None]:
    return set_key(key, 8, files.string(value.encode()))


def array(key: str, kind: int, values: bytes, count: int) -> Callable[[Any], None]:
    return set_key(key, 9, struct.pack("<IQ", kind, count) + values)


# ---- config.json ---------------------------------------------------------------------------------------------------

WRONG_TYPES: tuple[Any, ...] = ("a", 1.5, True, 10**30, [[1]], [float("nan")])


@pytest.mark.parametrize("value", WRONG_TYPES, ids=short_repr)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters", "layer_types"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_sections_and_lists_of_another_type(name: str, key: str, value: Any, directory: Callable[..., Path]) -> None:
    others = {"rope_parameters": None, "rope_scaling": None} if key.startswith("rope") else {}
    path = directory(name, **{**others, key: value})
    with pytest.raises(ModelError, match=rf"(?s){key}.*{path.name}/config\.json"):
        open_weights(path)


@pytest.mark.parametrize(
    "value", ["x", 1.5, True, [[1]], [1, "a"], {"a": 1}, -1, 288, HUGE, float("nan"), "1e400"], ids=short_repr
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_eos_ids_must_be_ids_of_the_vocabulary(file: str, value: Any, directory: Callable[..., Path]) -> None:
    path = directory("llama", file, eos_token_id=value)
    with pytest.raises(TokenizerError, match=rf"eos_token_id = .*{file}.* from 0 to 287"):
        open_model(str(path))


def test_eos_ids_that_are_absent_or_listed(directory: Callable[..., Path]) -> None:
    path = directory("llama", "generation_config.json", eos_token_id=None)
    assert Tokenizer.load(path).eos_ids == (1,)
    shutil.rmtree(path)
    assert Tokenizer.load(directory("llama", "generation_config.json", eos_token_id=[3, 287])).eos_ids == (3, 287)


@pytest.mark.parametrize("key", ["bos_token_id", "pad_token_id"])
def test_ids_that_are_not_used_are_warned_of(
    key: str, directory: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = directory("llama", "generation_config.json", **{key: -1})
    with caplog.at_level(logging.WARNING, logger="wager"):
        assert Tokenizer.load(path).eos_ids == (1,)
    [record] = caplog.records
    assert key in record.getMessage() and "-1" in record.getMessage() and str(path) in record.getMessage()


LLAMA3 = fuzz_models.CONFIGS["llama"]["rope_scaling"]
YARN = fuzz_models.CONFIGS["qwen3"]["rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling.factor = '8'"),
        ({"rope_scaling": {**LLAMA3, "factor": HUGE}}, "rope_scaling.factor = 1000"),
        ({"rope_scaling": {**LLAMA3, "factor": "1e400"}}, "rope_scaling.factor = inf"),
        ({"rope_scaling": {**LLAMA3, "factor": float("nan")}}, "rope_scaling.factor = nan"),
        ({"rope_scaling": {**LLAMA3, "rope_type": ["yarn"]}}, "rope_scaling.rope_type = "),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, "rope_scaling.truncate = 'no'"),
        ({"rope_scaling": {**YARN, "rope_theta": 1}}, "theta = 1.* above 1"),
        ({"rope_theta": HUGE}, "rope_theta = 1000"),
        ({"rope_theta": [1]}, "rope_theta = "),
        ({"num_attention_heads": 128, "head_dim": None}, "hidden_size = 64 .* too small for 128 heads"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps = 1e"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ({"attention_bias": [1]}, "attention_bias = "),
        ({"text_config": [1]}, "text_config = "),
        ({"architectures": "LlamaForCausalLM"}, "architectures = "),
        ({"num_nextn_predict_layers": "two"}, "num_nextn_predict_layers = 'two'"),
        ({"num_nextn_predict_layers": HUGE}, "num_nextn_predict_layers = 1000"),
        ({"hidden_act": {"a": "x" * 9000}}, "hidden_act = "),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str, directory: Callable[..., Path]) -> None:
    path = directory("llama", **{"rope_parameters": None, **changes})
    with pytest.raises(ModelError, match=message) as caught:
        open_weights(path)
    assert len(caught.value.message) < 600


def test_a_window_beyond_32_bits(directory: Callable[..., Path], gguf: Callable[..., Path]) -> None:
    """Found by the mutant config 7000001479."""
    with pytest.raises(ModelError, match=r"sliding_window = 8000000000 in .* larger"):
        open_weights(directory("qwen3", sliding_window=8 * 10**9))
    with pytest.raises(ModelError, match=r"sliding_window = 8000000000 in .* larger"):
        open_weights(gguf(number("llama.attention.sliding_window", "q", 8 * 10**9)))


def test_json_that_is_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_json(tmp_path / "config.json")


def test_the_reader_of_keys() -> None:
    keys = ConfigKeys({"a": 3, "b": [1, 2], "c": {"d": "x"}, "e": None, "f": 0, "g": 2.0}, where="w")
    assert keys.integer("a") == 3 and keys.integer("g") == 2 and keys.integer("z", "a") == 3
    assert keys.count("f") == 0 and keys.count("e", default=7) == 7
    assert keys.integers("b") == [1, 2] and keys.integers("e") is None
    assert keys.section("c").text("d") == "x" and keys.section("e").values == {}
    assert keys.token_ids("a", vocab=4) == (3,) and keys.token_ids("b", vocab=3) == (1, 2)
    with pytest.raises(ModelError, match=r"c\.d = 'x' in w must be a number above 0"):
        keys.section("c").number("d")
    assert len(short_repr("x" * 10**6)) < 100 and "bits" in short_repr(1 << 100_000)


# ---- GGUF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (number("general.alignment", "I", 24), "general.alignment = 24"),
        (text("general.alignment", "wide"), "general.alignment = 'wide'"),
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
        (text("tokenizer.ggml.eos_token_id", "end"), "eos_token_id = 'end'"),
        (array("tokenizer.ggml.merges", 8, files.string(b"zz qq"), 1), "out of vocabulary"),
        (number("llama.rope.freq_base", "f", 1.0), "llama.rope.freq_base = 1.0 .* above 1"),
        (number("llama.rope.freq_base", "f", float("inf")), "llama.rope.freq_base = inf"),
        (number("llama.rope.scaling.factor", "d", 1e300), "rope.scaling.factor = 1e"),
        (text("llama.rope.scaling.factor", "4"), "llama.rope.scaling.factor = '4'"),
        (number("llama.rope.scaling.attn_factor", "d", 1e300), "llama.rope.scaling.attn_factor = 1e"),
        (text("llama.attention.sliding_window", "8"), "llama.attention.sliding_window = '8'"),
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


def test_ids_that_a_model_can_do_without_are_warned_of(
    gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf(number("tokenizer.ggml.eot_token_id", "I", 10**6))
    with caplog.at_level(logging.WARNING, logger="wager"):
        assert Tokenizer.load(path).eos_ids == (1,)
    assert "tokenizer.ggml.eot_token_id = 1000000" in caplog.text


def double_key(parts: Any) -> None:
    parts.entries.append(parts.entries[3])


def double_tensor(parts: Any) -> None:
    parts.infos[-1].name = parts.infos[0].name


def overlap(parts: Any) -> None:
    parts.infos[5].offset = parts.infos[4].offset


def unnamed(parts: Any) -> None:
    parts.infos[0].name = b"\xff"


def dims(*sizes: int) -> Callable[[Any], None]:
    def change(parts: Any) -> None:
        parts.infos[-1].dims = list(sizes)

    return change


def counts(*, entries: int = 0, infos: int = 0) -> Callable[[Any], None]:
    def change(parts: Any) -> None:
        parts.more_entries, parts.more_infos = entries, infos

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (double_key, "twice"),
        (double_tensor, "twice"),
        (overlap, "begins at byte"),
        (unnamed, "no UTF-8"),
        (dims(*[2] * 100), "100 dimensions"),
        (dims(), "0 dimensions"),
        (dims(0), "cannot store"),
        (dims(2**32, 2**32), "truncated"),
        (dims(2**63, 2**63), "truncated"),
        (counts(entries=2**62), "truncated"),
        (counts(infos=2**62), "truncated"),
        (array("tokenizer.ggml.tokens", 8, b"", 2**40), "truncated"),
        (array("tokenizer.ggml.scores", 6, b"", 2**61), "truncated"),
        (array("tokenizer.ggml.tokens", 8, struct.pack("<Q", 2**63) + b"a" * 64, 3), "truncated"),
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
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


def test_a_quantised_block_with_a_scale_that_is_no_number(gguf: Callable[..., Path]) -> None:
    def change(parts: Any) -> None:
        info = next(info for info in parts.infos if info.name == b"blk.0.attn_k.weight")
        parts.data = parts.data[: info.offset] + b"\xff\x7f" + parts.data[info.offset + 2 :]

    with pytest.raises(ModelError, match=r"blk.0.attn_k.weight in .* no finite numbers"):
        open_weights(gguf(change)).read("layers.0.k.weight")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_stored_rope_factors_out_of_range(value: float, gguf: Callable[..., Path]) -> None:
    def change(parts: Any) -> None:
        parts.data += b"\0" * (-len(parts.data) % 32)
        parts.infos.append(files.Info(b"rope_freqs.weight", [8], 0, len(parts.data)))
        parts.data += struct.pack("<8f", *[1.0] * 7, value)

    with pytest.raises(ModelError, match=r"rope_freqs.weight in .* above 0 and finite"):
        open_weights(gguf(change))


# ---- what is not used -----------------------------------------------------------------------------------------------


def test_what_a_model_does_not_use_changes_nothing(
    models: Mapping[str, Path], gguf: Callable[..., Path], directory: Callable[..., Path]
) -> None:
    """The same tokens, although keys that nobody reads are there, of any type."""
    plain, nested = examine(models["llama"]), {"a": [float("nan"), HUGE, {"b": None}]}
    assert plain.outcome == "answer"
    assert examine(directory("llama", unknown=nested, transformers_version=7, use_cache="maybe")) == plain
    plain = examine(models["gguf"])
    assert plain.outcome == "answer"
    for change in (
        number("llama.unknown", "f", float("nan")),
        text("general.name", "x" * 10**5),
        array("other.list", 6, b"\xff" * 400, 100),
    ):
        assert examine(gguf(change)) == plain


# ---- chat templates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            marks=pytest.mark.slow,
        ),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        pytest.param(
            "{% set n = namespace(t='ab') %}{% for i in range(64) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            marks=pytest.mark.slow,
        ),
        "{% set n = namespace(t='ab') %}{% for i in range(64) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ lipsum(10 ** 9) }}",
        "{{ messages.nothing.more }}",
        "{{ raise_exception(1, 2) }}",
    ],
)
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


@pytest.mark.slow
def test_lists_that_a_template_makes_are_counted_by_their_entries(directory: Callable[..., Path]) -> None:
    path = directory("llama")
    (path / "chat_template.jinja").write_text(
        "{% set t = 'xa' * 500000 %}{% for i in range(99) %}{% set y = t.split('a') %}{% endfor %}"
    )
    with pytest.raises(TokenizerError, match="without end"):
        Tokenizer.load(path).chat(fuzz_models.MESSAGES)
