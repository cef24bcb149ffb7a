"""Published models by name, each with its sizes, its number formats and their source; draft heads released for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wager.arch.formats import Precision
from wager.arch.layers import Compressed, DeltaNet, Dense, Experts, Gqa, Indexer, Mla
from wager.arch.spec import Layer, ModelSpec
from wager.errors import UsageError
from wager.inputs import did_you_mean, shown

_BF16 = Precision.of("bf16")
_FP8 = Precision.of("fp8", router="bf16", head="bf16")
_MXFP4 = Precision.of("bf16", "mxfp4")
_V4 = Precision.of("fp8", "fp4", shared="fp8", router="bf16", head="bf16", fusion="fp8", cache="fp8")
_K2_INT4 = Precision.of("bf16", "int4g32", shared="bf16")


def _dense(
    name: str, layers: int, hidden: int, attention: Gqa, *, width: int, vocab: int, context: int, tied: bool = False
) -> ModelSpec:
    stack = (Layer(attention, Dense(width), layers),)
    return ModelSpec(name, hidden, vocab, tied, stack, _BF16, context, source="published config")


def _gpt_oss(name: str, layers: int, experts: int) -> ModelSpec:
    """Half of the layers attend to a window of 128 positions."""
    ffn = Experts(experts, 4, 0, 2880)
    stack = (Layer(Gqa(64, 8, 64, 128), ffn, layers // 2), Layer(Gqa(64, 8, 64), ffn, layers // 2))
    return ModelSpec(name, 2880, 201088, False, stack, _MXFP4, 131072, source="catalog")


def _mla(
    name: str, heads: int, dense: int, experts: Experts, *, vocab: int, context: int, precision: Precision
) -> ModelSpec:
    """DeepSeek-V3's stack of 61 layers, the first `dense` of them without experts."""
    attention = Mla(heads, 1536, 512, 128, 64, 128)
    stack = (Layer(attention, Dense(18432), dense), Layer(attention, experts, 61 - dense))
    return ModelSpec(name, 7168, vocab, False, stack, precision, context, source="published config")


def _v4(name: str, hidden: int, mix: tuple[int, int, int], experts: Experts, **sizes: int) -> ModelSpec:
    """DeepSeek-V4; `mix` counts layers with the window alone, with CSA and with HCA."""
    near = Compressed(sizes["heads"], 512, 64, sizes["q_rank"], sizes["groups"], 1024, window=128)
    kinds = (near, replace(near, ratio=4, indexer=Indexer(64, 128, sizes["picks"])), replace(near, ratio=128))
    stack = tuple(Layer(kind, experts, count) for kind, count in zip(kinds, mix, strict=True) if count)
    return ModelSpec(name, hidden, 129280, False, stack, _V4, 1048576, source="config; layer mix from the catalog")


_QWEN_MOE = Experts(128, 8, 0, 768)
_QWEN36 = Experts(256, 8, 1, 512)
_V3_EXPERTS, _K2_EXPERTS = Experts(256, 8, 1, 2048), Experts(384, 8, 1, 2048)

_QWEN_235B = ModelSpec(
    "Qwen3-235B-A22B",
    4096,
    151936,
    False,
    (Layer(Gqa(64, 4, 128), Experts(128, 8, 0, 1536), 94),),
    _BF16,
    40960,
    source="published config",
)

_ALL = (
    _dense("SmolLM2-135M", 30, 576, Gqa(9, 3, 64), width=1536, vocab=49152, context=8192, tied=True),
    _dense("Llama-3.1-8B", 32, 4096, Gqa(32, 8, 128), width=14336, vocab=128256, context=131072),
    _dense("Llama-3.1-70B", 80, 8192, Gqa(64, 8, 128), width=28672, vocab=128256, context=131072),
    _dense("Llama-3.2-1B", 16, 2048, Gqa(32, 8, 64), width=8192, vocab=128256, context=131072, tied=True),
    _dense("Qwen3-0.6B", 28, 1024, Gqa(16, 8, 128), width=3072, vocab=151936, context=40960, tied=True),
    _dense("Qwen3-8B", 36, 4096, Gqa(32, 8, 128), width=12288, vocab=151936, context=40960),
    ModelSpec(
        "Qwen3-30B-A3B", 2048, 151936, False, (Layer(Gqa(32, 4, 128), _QWEN_MOE, 48),), _BF16, 40960, source="config"
    ),
    _QWEN_235B,
    replace(_QWEN_235B, name="Qwen3-235B-A22B-FP8", precision=_FP8),
    ModelSpec(
        "Qwen3.6-35B-A3B",
        2048,
        248320,
        False,
        (Layer(Gqa(16, 2, 256), _QWEN36, 10), Layer(DeltaNet(16, 32, 128, 128, 4, written=False), _QWEN36, 30)),
        _BF16,
        262144,
        source="catalog, which leaves out the gate of the attention's output",
    ),
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    _mla("DeepSeek-V3", 128, 3, _V3_EXPERTS, vocab=129280, context=163840, precision=_FP8),
    _v4("DeepSeek-V4-Flash", 4096, (2, 21, 20), Experts(256, 6, 1, 2048), heads=64, q_rank=1024, groups=8, picks=512),
    _v4("DeepSeek-V4-Pro", 7168, (0, 30, 31), Experts(384, 6, 1, 3072), heads=128, q_rank=1536, groups=16, picks=1024),
    _mla("Kimi-K2", 64, 1, _K2_EXPERTS, vocab=163840, context=131072, precision=_FP8),
    _mla("Kimi-K2-0905", 64, 1, _K2_EXPERTS, vocab=163840, context=262144, precision=_FP8),
    _mla("Kimi-K2-Thinking", 64, 1, _K2_EXPERTS, vocab=163840, context=262144, precision=_K2_INT4),
)

TABLE: Mapping[str, ModelSpec] = {model.name: model for model in _ALL}
"""Models by name, each in the number formats of its release. The releases in 8 and 4 bits keep LM head, embedding and
router in bf16."""

ALIASES: Mapping[str, str] = {
    "SmolLM2-135M-Instruct": "SmolLM2-135M",
    "Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "Llama-3.1-70B-Instruct": "Llama-3.1-70B",
    "Llama-3.3-70B-Instruct": "Llama-3.1-70B",
    "Llama-3.2-1B-Instruct": "Llama-3.2-1B",
    "DeepSeek-R1": "DeepSeek-V3",
    "DeepSeek-V3-0324": "DeepSeek-V3",
    "DeepSeek-V3.1": "DeepSeek-V3",
    "Kimi-K2-Base": "Kimi-K2",
    "Kimi-K2-Instruct": "Kimi-K2",
    "Kimi-K2-Instruct-0905": "Kimi-K2-0905",
    "Kimi-K2.5": "Kimi-K2-Thinking",
    "Kimi-K2.6": "Kimi-K2-Thinking",
}
"""Other names of the same shape."""


# ---- heads that were released for a model ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReleasedHead:
    """A draft head on a target's states. `taps` layers of the target are fused into the head's width; the first of its
    own `layers` reads the embedding, too, where `reads_embedding`. `vocab`: of a head over the vocabulary of its own
    (None: the target's head). `block`: draft tokens of a pass, in `rows` rows (0: one pass a draft token, of one row).
    `markov` is the rank of a matrix over the vocabulary that every draft token of a block is multiplied with, one after
    another. `native`: stored as the target is, otherwise in 16 bits. `name`: of a checkpoint of this shape."""

    layers: tuple[Layer, ...]
    taps: int
    vocab: int | None = None
    reads_embedding: bool = False
    block: int = 0
    rows: int = 1
    markov: int = 0
    native: bool = False
    name: str = ""


def _eagle3(heads: int, kv_heads: int, dim: int, width: int, name: str = "") -> ReleasedHead:
    return ReleasedHead((Layer(Gqa(heads, kv_heads, dim), Dense(width)),), 3, 32000, reads_embedding=True, name=name)


def _dflash(layers: int, kv_heads: int, width: int, name: str = "") -> ReleasedHead:
    """Blocks of 16 rows, the last known token among them; 32 heads of 128."""
    return ReleasedHead((Layer(Gqa(32, kv_heads, 128), Dense(width), layers),), 5, block=15, rows=16, name=name)


def _v4_dspark(model: ModelSpec) -> ReleasedHead:
    """Three layers of the target's experts with its window alone; every row guesses the next token."""
    near = next(each.attention.near for each in model.layers if isinstance(each.attention, Compressed))
    layer = Layer(near, model.layers[-1].ffn, 3)
    name = f"deepseek-ai/{model.name}-DSpark"
    return ReleasedHead((layer,), 3, block=5, rows=5, markov=256, native=True, name=name)


_QWEN_DFLASH = _dflash(5, 8, 12288, "z-lab/Qwen3-8B-DFlash-b16")
RELEASED_HEADS: Mapping[str, Mapping[str, ReleasedHead]] = {
    "eagle3": {
        "Llama-3.1-8B": _eagle3(32, 8, 128, 14336, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        "Llama-3.1-70B": _eagle3(64, 8, 128, 28672),
        "Qwen3-8B": _eagle3(32, 8, 128, 12288, "AngelSlim/Qwen3-8B_eagle3"),
        "Qwen3-30B-A3B": _eagle3(32, 4, 128, 12288),
        "Qwen3-235B-A22B": _eagle3(64, 4, 128, 24576),
        "Qwen3.6-35B-A3B": _eagle3(16, 2, 256, 16384),
        "gpt-oss-20b": _eagle3(64, 8, 64, 17280),
        "gpt-oss-120b": _eagle3(64, 8, 64, 17280, "lmsys/EAGLE3-gpt-oss-120b-bf16"),
        "DeepSeek-V3": _eagle3(56, 8, 128, 40960),
        "Kimi-K2": _eagle3(64, 64, 128, 18432, "AQ-MedAI/Kimi-K2-Instruct-eagle3"),
        "Kimi-K2-Thinking": _eagle3(64, 64, 128, 18432, "AQ-MedAI/Kimi-K25-eagle3"),
    },
    "dflash": {"Qwen3-8B": _QWEN_DFLASH, "Qwen3.6-35B-A3B": _dflash(8, 4, 6144, "z-lab/Qwen3.6-35B-A3B-DFlash")},
    "dspark": {
        "Qwen3-8B": replace(_QWEN_DFLASH, block=7, rows=7, markov=256, name="deepseek-ai/dspark_qwen3_8b_block7"),
        "DeepSeek-V4-Flash": _v4_dspark(TABLE["DeepSeek-V4-Flash"]),
        "DeepSeek-V4-Pro": _v4_dspark(TABLE["DeepSeek-V4-Pro"]),
    },
}
"""By kind and target. Source: the configurations in github.com/sgl-project/SpecForge (August 2026), by which heads are
trained; of Kimi-K2 the checkpoints' own; of Qwen3.6-35B-A3B those of Qwen3.5-35B-A3B, which has the same shape; of
DeepSeek-V4-Pro that of Flash with the target's sizes."""

WITH_MTP = frozenset({"DeepSeek-V3", "DeepSeek-V4-Flash", "DeepSeek-V4-Pro", "Qwen3.6-35B-A3B"})
"""Models of the table whose checkpoints have a multi-token-prediction module."""


def find_head(kind: str, target: str, *, hidden: int) -> ReleasedHead:
    """The head of that kind (a key of RELEASED_HEADS) for a target by name, or UsageError with the targets that have
    one, and for a target of another hidden size. Formats of the target do not matter."""
    heads, model = RELEASED_HEADS[kind], _known(target)
    name = "" if model is None else model.name.removesuffix("-FP8").removesuffix("-0905")
    if model is None or name not in heads:
        raise UsageError(
            f"No {kind} head for {shown(target)} is known.",
            f"Known are those for {', '.join(heads)}: write {kind}:NAME for a model of that shape.",
        )
    if model.hidden != hidden:
        raise UsageError(
            f"The {kind} head for {name} reads states of {model.hidden} elements, and the target's have {hidden}.",
            "A head fits targets of one shape.",
        )
    return heads[name]


def _known(name: str) -> ModelSpec | None:
    """The model of that name, ignoring case and a leading organisation; None if there is none."""
    names = {known.lower(): known for known in (*TABLE, *ALIASES)}
    exact = names.get(name.rpartition("/")[2].lower())
    return TABLE[ALIASES.get(exact, exact)] if exact else None


def find_model(name: str) -> ModelSpec:
    """The model of that name, or UsageError with the nearest names."""
    model = _known(name)
    if model is None:
        hint = did_you_mean(name.rpartition("/")[2], TABLE, most=2, otherwise="Known by name: {}.")
        raise UsageError(f"Model {shown(name)} is not known.", f"{hint} Otherwise give a directory or a GGUF file.")
    return model
