"""Models of realistic proportions with random weights, for measuring: `random:FAMILY:SIZE`.

Nothing is fetched: the shape is a row of a table, the weights come from a seed, the tokenizer has one token per byte.
The text of such a model has no meaning; a pass takes as long as with a trained model of the same shape whose experts
are chosen almost uniformly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from wager.arch.hf_config import read_config
from wager.arch.spec import ModelSpec
from wager.errors import ModelError
from wager.models.hub import RANDOM
from wager.models.random_weights import random_weights
from wager.models.tokenizer import Tokenizer, byte_alphabet
from wager.models.tokenizer_parts import TokenizerParts
from wager.models.weights import Weights

_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def _dense(*sizes: int, **further: Any) -> dict[str, Any]:
    return {**dict(zip(_KEYS, sizes, strict=True)), "max_position_embeddings": 8192, **further}


def _deepseek(*sizes: int, q: int, rank: int, nope: int, rope: int, value: int, **further: Any) -> dict[str, Any]:
    hidden, layers, heads, width, vocab = sizes
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "q_lora_rank": q,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 8192,
        **further,
    }


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN = {"norm_topk_prob": True, "num_experts_per_tok": 8}

MODELS: Mapping[str, tuple[str, Mapping[str, Mapping[str, Any]]]] = {
    "llama": (
        "LlamaForCausalLM",
        {
            "tiny": _dense(64, 2, 4, 2, 16, 160, 512, tie_word_embeddings=True),
            "135m": _dense(576, 30, 9, 3, 64, 1536, 49152, rope_theta=1e5, tie_word_embeddings=True),
            "1b": _dense(2048, 16, 32, 8, 64, 8192, 128256, rope_theta=5e5, tie_word_embeddings=True),
            "8b": _dense(4096, 32, 32, 8, 128, 14336, 128256, rope_theta=5e5),
        },
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {
            "tiny": _dense(64, 2, 4, 2, 16, 192, 512, tie_word_embeddings=True),
            "0.6b": _dense(1024, 28, 16, 8, 128, 3072, 151936, rope_theta=1e6, tie_word_embeddings=True),
            "1.7b": _dense(2048, 28, 16, 8, 128, 6144, 151936, rope_theta=1e6, tie_word_embeddings=True),
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {
            "tiny": _dense(64, 2, 4, 2, 16, 224, 512, **_MIXTRAL),
            "300m": _dense(640, 9, 10, 2, 64, 2240, 32000, **_MIXTRAL),
            "1b": _dense(1024, 10, 8, 2, 128, 3584, 32000, **_MIXTRAL),
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "tiny": _dense(
                64,
                2,
                4,
                2,
                16,
                192,
                512,
                num_experts=16,
                moe_intermediate_size=24,
                **{**_QWEN, "num_experts_per_tok": 4},
            ),
            "300m": _dense(512, 7, 8, 1, 128, 1536, 32000, num_experts=128, moe_intermediate_size=192, **_QWEN),
            "1b": _dense(768, 10, 12, 2, 128, 2304, 32000, num_experts=128, moe_intermediate_size=288, **_QWEN),
        },
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        {
            "tiny": _deepseek(
                64,
                3,
                4,
                160,
                512,
                q=48,
                rank=32,
                nope=16,
                rope=16,
                value=16,
                n_routed_experts=16,
                num_experts_per_tok=4,
                n_group=4,
                topk_group=2,
                moe_intermediate_size=24,
            ),
            "300m": _deepseek(
                512,
                8,
                8,
                1536,
                32000,
                q=192,
                rank=128,
                nope=64,
                rope=32,
                value=64,
                n_routed_experts=64,
                num_experts_per_tok=6,
                n_group=8,
                topk_group=4,
                moe_intermediate_size=320,
            ),
            "1b": _deepseek(
                1024,
                10,
                8,
                2816,
                32000,
                q=384,
                rank=256,
                nope=64,
                rope=32,
                value=64,
                n_routed_experts=64,
                num_experts_per_tok=6,
                n_group=8,
                topk_group=4,
                moe_intermediate_size=448,
            ),
        },
    ),
}
"""Family -> its architecture, and by size the configuration keys of a model of about that many parameters.

135m, 1b and 8b (llama), 0.6b and 1.7b (qwen3) are the shapes of SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B, Qwen3-0.6B
and 1.7B. The mixtures
keep the proportions of Mixtral-8x7B, Qwen3-30B-A3B and DeepSeek-V3 (experts to choose from, their width to the hidden
size, groups, latent to hidden size) at a size that fits on a small machine; vocabularies are 32,000.
"""


def make(model: str) -> tuple[Weights, Tokenizer]:
    """Weights and tokenizer of `random:FAMILY:SIZE`. ModelError names a family or a size that is not known."""
    spec = spec_of(model)
    return random_weights(spec, 0), byte_tokenizer(spec.vocab, where=model)


def spec_of(model: str) -> ModelSpec:
    """The spec alone; errors as `make`."""
    family, _, size = model.removeprefix(RANDOM).partition(":")
    if family not in MODELS:
        raise ModelError(f"There is no random model of family {family!r}.", f"Families are: {', '.join(MODELS)}.")
    architecture, sizes = MODELS[family]
    if size not in sizes:
        raise ModelError(f"There is no random {family} of size {size!r}.", f"Sizes are: {', '.join(sizes)}.")
    return read_config({"architectures": [architecture], **sizes[size]}, name=model, runnable=True)


def byte_tokenizer(vocab: int, *, where: str) -> Tokenizer:
    """A tokenizer that encodes one token per byte; the last id is EOS, the text of the others is their number."""
    alphabet = byte_alphabet()
    alphabet |= {f"\u0120{i}": i for i in range(256, vocab - 1)}  # U+0120 stands for a space
    backend = Backend(BPE({**alphabet, _END: vocab - 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(_END, normalized=False, special=True)])
    eos = vocab - 1
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            spelling="byte-level",
            vocab_size=vocab,
            eos_ids=(eos,),
            where=where,
            special=frozenset({eos}),
            literal=frozenset({eos}),
            named={"eos_token": _END},
            chat_template=_TEMPLATE,
        )
    )
