"""Digests of a model: the form of configuration and tokenizer is pinned, and every value, tensor and token that matters
changes one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tokenizer_models import save_model

from wager.arch.hf_config import read_config
from wager.arch.layers import Activation, DeltaNet, Dense, Experts, Gating, Gqa, Mamba2, Mla, Rotation, ShortConv
from wager.arch.rope import Rope
from wager.arch.spec import DecoderDetails, Layer, ModelSpec, Multipliers
from wager.kernels.arrays import FLOAT32, Array, DType
from wager.kernels.cpu import select
from wager.models.digests import ModelDigests, config_digest, configuration, tokenizer_digest
from wager.models.gguf import StoredAs
from wager.models.random_models import MODELS, RandomWeights, byte_tokenizer, spec_of
from wager.models.tokenizer import Tokenizer
from wager.models.transformer import Decoder
from wager.models.weights import tensor_shapes

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
"""SmolLM2-135M's, with two of its layers."""

LAYER = {
    "attention": {"kind": "gqa", "heads": 9, "kv_heads": 3, "head_dim": 64, "rope_dim": 64},
    "feed_forward": {"kind": "dense", "width": 1536},
}

PINNED = {
    "llama": "d6d58a5a8ec1",
    "qwen3": "410b76fbba0b",
    "gemma3": "5d7bdc6bc4df",
    "gemma4": "65ad374df0e4",
    "gemma4-moe": "c97c208a166e",
    "gemma2": "76d2e83eabfa",
    "phi4": "0eb48c632c9e",
    "granite": "f3e591ab2ce6",
    "smollm3": "ffe5dc55893b",
    "olmo2": "c70984f102bf",
    "olmo3": "40d2c15a2871",
    "glm4": "5c8cfddc4dab",
    "mixtral": "24d212098c42",
    "qwen3-moe": "8c837cd12a89",
    "deepseek": "91151f706215",
    "qwen2-moe": "61a69bacacf5",
    "qwen3-next": "a784512b0c23",
    "qwen3.5": "352356463a5b",
    "lfm2": "cc8012d71c19",
    "granite-h": "db74dd7df370",
    "falcon-h1": "c0906573011f",
    "nemotron-h": "e1a2d8b01c3c",
    "nemotron-h-moe": "84b4f88c0f83",
    "gpt-oss": "1d0d38aaa6de",
}
"""The digests of random models of every family, each by its beginning."""

# ---- the form --------------------------------------------------------------------------------------------------------


def test_a_known_configuration_is_written_as_it_always_was() -> None:
    spec = read_config(SMOLLM2, runnable=True)
    assert configuration(spec) == {
        "form": 1,
        "hidden": 576,
        "vocab": 49152,
        "tied": True,
        "norm_eps": 1e-05,
        "rope": {"global": {"theta": 100000}},
        "layers": [LAYER, LAYER],
    }
    assert config_digest(spec) == "0164704047ad9988179461c126679d47486cce285148e723e0604e7f98b1ec07"
    assert config_digest(read_config({**SMOLLM2, "rope_theta": 1e5}, runnable=True)) == config_digest(spec)


def test_every_family_is_written_as_it_always_was() -> None:
    """A class or a field that is renamed, or has another default, leaves digests as they are."""
    assert {family: config_digest(spec_of(f"random:{family}:tiny"))[:12] for family in MODELS} == PINNED


# ---- values ----------------------------------------------------------------------------------------------------------

SPEC = replace(read_config({**SMOLLM2, "num_hidden_layers": 1}, runnable=True), layer_embedding=8)
GQA = Gqa(heads=4, kv_heads=2, head_dim=64)
EXPERTS = Experts(count=8, active=2, shared=1, width=64)

PARTS: tuple[tuple[Any, Callable[[Any], ModelSpec]], ...] = (
    (SPEC, lambda part: part),
    (SPEC.details, lambda part: replace(SPEC, decoder=part)),
    (Multipliers(), lambda part: replace(SPEC, decoder=replace(SPEC.details, multipliers=part))),
    (Rope(1e4, (1.0,), 1.0, (2.0,), 64), lambda part: replace(SPEC, decoder=replace(SPEC.details, rope=part))),
    *((part, lambda part: with_layer(part, Dense(64))) for part in (GQA, Mla(4, 32, 64, 32, 16, 32))),
    *((part, lambda part: with_layer(part, Dense(64))) for part in (DeltaNet(2, 4, 16, 16, 4), ShortConv(64, 4))),
    (Mamba2(4, 16, 2, 16, 4), lambda part: with_layer(part, Dense(64))),
    *((part, lambda part: with_layer(GQA, part)) for part in (Dense(64), EXPERTS)),
    (Gating(), lambda part: with_layer(GQA, replace(EXPERTS, gating=part))),
)
"""A value of every class that a decoder is made of, and what makes a model with it."""

NOT_WRITTEN = {
    ModelSpec: {"name", "precision", "context", "head", "router", "source", "other_inputs"},
    DecoderDetails: {"architecture", "interleaved_rope", "norm_offset", "log_rates", "logit_scale", "split_latent"},
    Mla: {"indexer"},
    DeltaNet: {"written"},
    Mamba2: {"written"},
    ShortConv: {"written"},
}
"""Names, what only plans are made with, and how a checkpoint is read, which the digests of weights show."""

ELSEWHERE = {"layers", "decoder", "layer_order", "local_rope"}
"""What the next test changes."""


def with_layer(attention: Any, ffn: Any) -> ModelSpec:
    return replace(SPEC, layers=(Layer(attention, ffn),))


def other(value: Any) -> Any:
    """Another value of its kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        words = next((words for words in map(get_args, (Activation, Rotation)) if value in words), ("x", "sigmoid"))
        return next(word for word in words if word != value)
    if isinstance(value, tuple):
        return (*value, 2.0)
    if is_dataclass(value):
        first = fields(value)[0].name
        return replace(value, **{first: other(getattr(value, first))})  # type: ignore[type-var]
    return 3 if value is None else 2 * value if value else 1


def test_every_value_that_matters_changes_the_digest() -> None:
    """Of every field: a new one must be written, or named above."""
    for part, made in PARTS:
        for each in fields(part):
            if each.name not in ELSEWHERE:
                changed = replace(part, **{each.name: other(getattr(part, each.name))})
                same = config_digest(made(changed)) == config_digest(made(part))
                assert same == (each.name in NOT_WRITTEN.get(type(part), ())), (type(part), each.name)


def test_layers_count_in_their_order_and_rotations_where_they_are_used() -> None:
    local, details = replace(GQA, rotation="local", window=64), SPEC.details
    layers = (Layer(GQA, Dense(64)), Layer(local, Dense(64)), Layer(ShortConv(64, 4), EXPERTS))

    def of(order: tuple[int, ...], rope: Rope | None = None) -> str:
        return config_digest(replace(SPEC, layers=layers, decoder=replace(details, layer_order=order, local_rope=rope)))

    orders = [(0, 1), (1, 0), (0,), (0, 0), (0, 2), (0, 1, 2)]
    assert len({of(order, Rope(1e4)) for order in orders}) == len(orders)
    assert of((0, 1), Rope(1e4)) != of((0, 1), Rope(1e5))
    one = replace(SPEC, layers=layers[:1])
    assert config_digest(replace(one, decoder=replace(details, local_rope=Rope(1e4)))) == config_digest(one)


# ---- weights ---------------------------------------------------------------------------------------------------------


class ChangedWeights(RandomWeights):
    """Random weights in which one number of every tensor of that name is another."""

    def __init__(self, spec: ModelSpec, part: str) -> None:
        super().__init__(spec, 0)
        self._part = part

    def read(self, name: str, dtype: DType = FLOAT32) -> Array:
        found = super().read(name, dtype)
        if part_of(name) == self._part:
            last = found.reshape(-1)[-1:]
            last[:] = last + np.asarray(1, dtype)
        return found

    def stored(self, name: str) -> StoredAs:
        return StoredAs("random")  # floats, all of them


def part_of(name: str) -> str:
    """`q.weight` of `layers.3.q.weight`."""
    return ".".join(name.split(".")[-2:])


@pytest.mark.parametrize("family", MODELS)
def test_every_tensor_is_in_a_digest(family: str) -> None:
    spec, kernels = spec_of(f"random:{family}:tiny"), select(threads=1)
    limits = {"num_blocks": 8, "max_rows": 8, "max_sequences": 2, "max_blocks": 8}

    def of(part: str) -> Mapping[str, str]:
        weights = ChangedWeights(spec, part)
        decoder = Decoder(weights, kernels, **limits, dtype="bf16")
        return ModelDigests.of(decoder, weights, byte_tokenizer(spec.vocab, where="here")).weights

    before, names = of(""), tensor_shapes(spec)
    for part in dict.fromkeys(map(part_of, names)):
        after = of(part)
        changed = {name for name in before if before[name] != after[name]}
        for name in names:
            if part_of(name) == part:
                layer = name.split(".")[:2] if name.startswith("layers.") else [part.split(".")[0]]
                assert [each for each in changed if each.split(".")[: len(layer)] == layer], name


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path / "model", hidden_size=64, num_attention_heads=4, intermediate_size=96))


def test_how_the_library_writes_a_tokenizer_does_not_matter(folder: Path) -> None:
    before = tokenizer_digest(Tokenizer.load(folder))
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text(encoding="utf-8"))
    value["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in value["model"]["merges"]]
    value["model"] = {name: each for name, each in value["model"].items() if each is not None and each is not False}
    path.write_text(json.dumps(dict(reversed(value.items())), indent=3), encoding="utf-8")
    assert tokenizer_digest(Tokenizer.load(folder)) == before
    files = Tokenizer.load(folder).files()
    older = {**json.loads(files["tokenizer.json"]), "truncation": None, "new": False}
    tokenizer = Tokenizer.load(folder)
    tokenizer.files = lambda: {**files, "tokenizer.json": json.dumps(older)}  # type: ignore[method-assign]
    assert tokenizer_digest(tokenizer) == before


def test_what_a_tokenizer_does_changes_its_digest(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    before, files = tokenizer_digest(tokenizer), tokenizer.files()
    seen = {before}

    def changed(name: str, change: Callable[[Any], Any]) -> None:
        value = json.loads(files[name])
        change(value)
        tokenizer.files = lambda: {**files, name: json.dumps(value)}  # type: ignore[method-assign]
        assert tokenizer_digest(tokenizer) not in seen, name
        seen.add(tokenizer_digest(tokenizer))

    def swap(value: Any) -> None:
        vocab = value["model"]["vocab"]
        first, second = list(vocab)[300:302]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    changed("tokenizer.json", swap)
    changed("tokenizer.json", lambda value: value["model"]["merges"].reverse())
    changed("tokenizer.json", lambda value: value.update(normalizer={"type": "NFC"}))
    changed("tokenizer.json", lambda value: value["model"].update(ignore_merges=True))
    changed("tokenizer_config.json", lambda value: value.update(bos_token="<other>"))
    tokenizer.eos_ids = (*tokenizer.eos_ids, 5)
    changed("tokenizer.json", lambda value: None)
    tokenizer.suppressed_ids = (7,)
    changed("tokenizer.json", lambda value: None)
    tokenizer.space_prefix = "fragment"
    changed("tokenizer.json", lambda value: None)
