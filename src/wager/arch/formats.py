"""Number formats: bytes per stored element and the arithmetic of its products; which format each part of a model has;
and Stream, the work of one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wager.errors import UsageError
from wager.inputs import did_you_mean, shown


@dataclass(frozen=True, slots=True)
class Format:
    """`bytes` of one stored element, scales included; `compute` is the arithmetic of its products."""

    name: str
    bytes: float
    compute: str


FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        Format("fp32", 4.0, "fp32"),
        Format("bf16", 2.0, "bf16"),
        Format("fp16", 2.0, "fp16"),
        Format("fp8", 1.0, "fp8"),
        Format("int8", 1.0, "int8"),
        Format("w8a16", 1.0, "bf16"),  # 8-bit weights alone, integers or floats
        Format("fp4", 0.53, "fp4"),  # 4 bits and a scale of 8 bits per 32 elements
        Format("nvfp4", 0.5625, "fp4"),  # 4 bits and a scale of 8 bits per 16 elements
        Format("mxfp4", 0.53, "bf16"),  # the bytes of fp4, multiplied as bf16
        Format("nvfp4a16", 0.5625, "bf16"),
        Format("int4", 0.53, "bf16"),
        Format("w4a8", 0.53, "int8"),
        Format("w4afp8", 0.53, "fp8"),
        Format("nf4", 0.53, "bf16"),  # bitsandbytes
        Format("int3", 0.41, "bf16"),
        Format("int2", 0.28, "bf16"),
    )
}

_SPELLINGS = {
    "float32": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "fp8-dynamic": "fp8",
    "fp8_e4m3": "fp8",
    "e4m3": "fp8",
    "float8": "fp8",
    "w8a8": "int8",
    "w8a8-int8": "int8",
    "w8a8-fp8": "fp8",
    "w4a16": "int4",
    "awq": "int4",
    "gptq": "int4",
    "bnb-4bit": "nf4",
    "bnb-8bit": "int8",
    "q8": "q8_0",
}
"""Other names of the same format."""

_GGUF_BITS = {
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k_m": 5.65,
    "q5_k_s": 5.53,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_k_m": 4.8,
    "q4_k_s": 4.53,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "q3_k_m": 3.85,
}
"""Bits of a weight by llama.cpp's file types, scales included. Of a _K_M file it is the mean over the layers of
Llama-3.1-8B: half of the value and down projections are stored two bits wider. Products are of 8-bit integers."""

FILE_TYPES: Mapping[str, Format] = {name: Format(name, bits / 8, "int8") for name, bits in _GGUF_BITS.items()}


def find_format(name: str) -> Format:
    """The format of that name, or UsageError with the nearest ones."""
    key = name.strip().lower().replace("-", "_")
    spelt = {known.replace("-", "_"): format_name for known, format_name in _SPELLINGS.items()}.get(key, key)
    known = {**FORMATS, **FILE_TYPES}
    if spelt not in known:
        hint = did_you_mean(key, [*known, *_SPELLINGS], most=2, otherwise="Known are: {}.")
        raise UsageError(f"Number format {shown(name)} is not known.", hint)
    return known[spelt]


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats of a model: of its feed-forward `weights`, attention's `projections`, routed `experts`, `shared`
    experts, `router`, LM `head` and input `embedding`.

    `cache` and `query` are bytes per element of cached keys and values (or latents) and of query vectors, `activations`
    and `dispatch` of activations sent between devices and to experts on other devices; `attention` is the
    arithmetic of attention, `index` that of an indexer's scores.
    """

    weights: Format
    experts: Format
    shared: Format
    projections: Format
    router: Format
    head: Format
    embedding: Format
    cache: float
    query: float = 2.0
    attention: str = "bf16"
    index: str = "fp8"
    activations: float = 2.0
    dispatch: float = 2.0

    @classmethod
    def of(
        cls,
        weights: Format | str,
        experts: Format | str | None = None,
        *,
        shared: Format | str | None = None,
        projections: Format | str | None = None,
        router: Format | str | None = None,
        head: Format | str | None = None,
        embedding: Format | str | None = None,
        cache: str = "bf16",
    ) -> Precision:
        """By formats or their names; `experts`, `projections`, `router` and `head` default to `weights`, `shared` to
        `experts`, `embedding` to `head`. UsageError names an unknown format.

        Activations are sent in 8 bits to experts that compute in 8 or 4.
        """
        routed = _format(experts or weights)
        return cls(
            weights=_format(weights),
            experts=routed,
            shared=_format(shared or routed),
            projections=_format(projections or weights),
            router=_format(router or weights),
            head=_format(head or weights),
            embedding=_format(embedding or head or weights),
            cache=find_format(cache).bytes,
            dispatch=1.0 if routed.compute in ("fp8", "fp4", "int8") else 2.0,
        )

    @classmethod
    def parse(cls, text: str) -> Precision:
        """WEIGHTS[:EXPERTS[:HEAD]], each the name of a format; EXPERTS may be empty.

        Quantised weights leave router, LM head and embedding in bf16, as published checkpoints do; llama.cpp's file
        types store the head in q6_k, or as the weights where these are wider. HEAD states another.
        """
        words = [word.strip() for word in text.split(":")]
        if len(words) > 3 or not words[0]:
            raise UsageError(f"precision = {text!r} is not understood.", "Write WEIGHTS[:EXPERTS[:HEAD]], as in fp8.")
        named = [find_format(word) if word else None for word in (*words, "", "")][:3]
        weights, experts, head = named[0] or FORMATS["bf16"], named[1], named[2]
        wide = weights if weights.bytes >= 2 else FORMATS["bf16"]
        if head is None and weights.name in FILE_TYPES:
            head = max(weights, FILE_TYPES["q6_k"], key=lambda kind: kind.bytes)
        return cls.of(weights, experts, router=wide, head=head or wide)

    def format_of(self, part: str) -> Format:
        """The format of a part of ModelSpec.elements: projections, ffn, router, shared, experts, head, embedding."""
        found: Format = self.weights if part == "ffn" else getattr(self, part)
        return found


def _format(kind: Format | str) -> Format:
    return find_format(kind) if isinstance(kind, str) else kind


@dataclass(frozen=True, slots=True)
class Stream:
    """The work of one kind of kernel (`part`) in a step: `flops` in the arithmetic `compute`, `bytes` of weights or
    queries, and `cached` bytes of cache. FLOPs and `bytes` divide among all tensor-parallel devices, the cache among
    `shards` of them at most."""

    part: str
    flops: float
    bytes: float
    compute: str
    cached: float = 0.0
    shards: int = 1
