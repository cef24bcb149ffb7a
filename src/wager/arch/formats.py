"""Number formats: bytes of a stored element and the arithmetic of its products; the format of each part of a model, by
name or as the quantisation in a config.json states it; and Stream, the work of one kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from wager.errors import ModelError, UsageError
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
        Format("int4g32", 0.5625, "bf16"),  # 4 bits and a scale of 16 bits per 32 elements
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
"""Bits of a weight by llama.cpp's file types, scales included. For a _K_M file they are the mean over the layers of
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
    experts, `router`, LM `head` and input `embedding`, and of the `fusion` of a target's states in its MTP module.

    `cache` and `query` are bytes per element of cached keys and values (or latents) and of query vectors, `activations`
    of activations sent between devices, `dispatch` of rows sent to experts on other devices and `combine` of what these
    send back, `state` of a recurrent layer's state; `attention` is the arithmetic of attention, `index` that of an
    indexer's scores.
    """

    weights: Format
    experts: Format
    shared: Format
    projections: Format
    router: Format
    head: Format
    embedding: Format
    fusion: Format
    cache: float
    query: float = 2.0
    attention: str = "bf16"
    index: str = "fp8"
    activations: float = 2.0
    dispatch: float = 2.0
    combine: float = 2.0
    state: float = 2.0

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
        fusion: Format | str | None = None,
        cache: str = "bf16",
    ) -> Precision:
        """By formats or their names; `experts`, `projections`, `router` and `head` default to `weights`, `shared` to
        `experts`, `embedding` to `head`, and `fusion` to a head of 16 bits, beside which checkpoints leave it so, else
        to `weights`. UsageError names an unknown format.

        Rows are sent in 8 bits to experts that compute in 8 or 4, and come back in 16: the convention of DeepEP
        (github.com/deepseek-ai/DeepEP, "FP8 dispatching and BF16 combining"). The scales of 8-bit rows, 4 bytes for
        128 elements, are left out: 1 % of a copy and its return.
        """
        routed = _format(experts or weights)
        stored_head = _format(head or weights)
        return cls(
            weights=_format(weights),
            experts=routed,
            shared=_format(shared or routed),
            projections=_format(projections or weights),
            router=_format(router or weights),
            head=stored_head,
            embedding=_format(embedding or stored_head),
            fusion=_format(fusion or (stored_head if stored_head.bytes >= 2 else weights)),
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
        weights = named[0] or FORMATS["bf16"]
        experts = named[1]
        head = named[2]
        wide = weights if weights.bytes >= 2 else FORMATS["bf16"]
        embedding = wide
        if weights.name in FILE_TYPES:
            embedding = head = head or max(weights, FILE_TYPES["q6_k"], key=lambda kind: kind.bytes)
        return cls.of(weights, experts, router=wide, head=head or wide, embedding=embedding)

    def format_of(self, part: str) -> Format:
        """The format of a part of ModelSpec.elements, or of the fusion; compressors are stored as the router is."""
        found: Format = getattr(self, {"ffn": "weights", "compressors": "router"}.get(part, part))
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


# ---- formats in config.json ----------------------------------------------------------------------------------------
# A quantisation names the modules that it converts, or those that it leaves alone. The format of a part is looked up by
# the names that its modules have in checkpoints; where layers differ, most of them decide.

_LAYER = "model.layers.{layer}."
_MODULES: Mapping[str, tuple[str, ...]] = {
    "projections": tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    "weights": tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "experts": tuple(f"mlp.experts.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "shared": tuple(f"{name}.down_proj" for name in ("mlp.shared_experts", "mlp.shared_expert")),
    "router": ("mlp.gate", "mlp.router", "block_sparse_moe.gate"),
}
_EXCLUSIONS = (
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "llm_int8_skip_modules",
)


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Patterns of modules' names: names, or parts of names between dots (`gate` is not gate_proj), and expressions for
    whole names. Published lists have thousands of the former, so these are looked up."""

    words: frozenset[str]
    expressions: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> _Patterns:
        """From a configuration's: after re: a regular expression of a name's beginning, else words with * for
        anything."""
        words, expressions = set(), []
        for pattern in patterns:
            word = pattern.strip(".").removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
            if pattern.startswith("re:"):
                try:
                    expressions.append(re.compile(pattern[3:]))
                except re.error as error:
                    raise ModelError(f"quantization_config has the pattern {pattern!r}: {error}.") from error
            elif "*" in word:
                expressions.append(re.compile(rf"(?:.*\.)?{re.escape(word)}(?:\.|$)".replace(r"\*", ".*")))
            else:
                words.add(word)
        return cls(frozenset(words), tuple(expressions))

    def match(self, name: str) -> bool:
        """Whether one names the module."""
        parts = name.split(".")
        runs = (".".join(parts[first:last]) for last in range(len(parts) + 1) for first in range(last))
        return any(run in self.words for run in runs) or any(each.match(name) for each in self.expressions)


_LINEAR = "Linear"
"""The class of the modules that a quantisation converts unless it says otherwise."""
_ALL = _Patterns(frozenset([_LINEAR]), ())


@dataclass(frozen=True, slots=True)
class _Group:
    """The modules that are stored in `stored`: by patterns of their names, or all of the class Linear."""

    targets: _Patterns
    stored: Format


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A quantisation: `groups` of converted modules and patterns of `excluded` ones.

    `head`: the class Linear includes the LM head. `parts`: the only parts that the method converts (None: all).
    """

    groups: tuple[_Group, ...]
    excluded: _Patterns
    head: bool = False
    parts: tuple[str, ...] | None = None

    def format_of(self, part: str, layers: int) -> Format | None:
        """The format of a part; None where it is left alone."""
        if self.parts is not None and part not in self.parts:
            return None
        if part == "head":
            return self._stored("lm_head", by_class=self.head)
        names = [(_LAYER + name).format(layer=layer) for layer in range(layers) for name in _MODULES[part]]
        # a router is no Linear in most models, and engines leave it alone unless it is named
        found = Counter(self._stored(name, by_class=part != "router") for name in names)
        if part in ("shared", "router") and len(found) > 1:  # a pattern for one of the spellings
            return next((kind for kind in found if (kind is None) == (part == "shared")), None)
        return found.most_common(1)[0][0]

    def _stored(self, name: str, *, by_class: bool) -> Format | None:
        if self.excluded.match(name):
            return None
        for group in self.groups:
            if group.targets.match(name):
                return group.stored
        return next((group.stored for group in self.groups if by_class and _LINEAR in group.targets.words), None)


def read_precision(
    config: Mapping[str, Any], layers: int, *, cache: str | None = None, given: Precision | None = None
) -> Precision:
    """The number formats of a config.json whose model has that many layers, or the `given` ones of its weights; `cache`
    that of keys and values where the configuration does not state it.

    ModelError names a quantisation that is not known.
    """
    stored = config.get("quantization_config")
    stored = stored if isinstance(stored, Mapping) else {}
    nested = stored.get("quantization")  # hf_quant_config.json of modelopt
    if isinstance(nested, Mapping):
        stored = {"quant_method": "modelopt", **stored, **nested}
    precision = given or _stored_precision(config, stored, layers)
    cache = "fp8" if _narrow_cache(stored) else cache or "bf16"
    return replace(precision, cache=find_format(cache).bytes, state=_state_bytes(config))


def _stored_precision(config: Mapping[str, Any], stored: Mapping[str, Any], layers: int) -> Precision:
    """Of weights alone; `stored` is the configuration's quantisation, empty without one."""
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    wide = {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16")
    if not stored:
        return Precision.of(wide)
    scheme = _read_scheme(stored)
    wide = "bf16" if wide == "fp32" else wide  # what is left alone is served in 16 bits
    formats = {part: scheme.format_of(part, layers) or wide for part in (*_MODULES, "head")}
    if config.get("tie_word_embeddings"):  # the head is the embedding, which is no module of its own
        formats["head"] = wide
    fusion = None
    if config.get("expert_dtype") == "fp4":  # DeepSeek-V4 states it in addition to an fp8 quantisation
        formats["experts"], fusion = FORMATS["fp4"], formats["weights"]
    return Precision.of(**formats, embedding=wide, fusion=fusion, cache="bf16")


def _narrow_cache(stored: Mapping[str, Any]) -> bool:
    """Whether a quantisation states that keys and values have 8 bits."""
    scheme, named = stored.get("kv_cache_scheme"), str(stored.get("kv_cache_quant_algo") or "").upper()
    return named in ("FP8", "INT8") or (isinstance(scheme, Mapping) and str(scheme.get("num_bits")) == "8")


def _state_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of an element of a recurrent state: 4 where Qwen3.5's and Nemotron-H's keys say so, by which engines go."""
    said = (str(config.get(key)).removeprefix("torch.") for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"))
    return 4.0 if "float32" in said else 2.0


def _read_scheme(stored: Mapping[str, Any]) -> _Scheme:
    method = str(stored.get("quant_method", "unnamed"))
    excluded = _Patterns.of(_patterns(stored))
    if isinstance(stored.get("config_groups"), Mapping):
        return _Scheme(tuple(_groups(stored["config_groups"])), excluded, head=method == "compressed-tensors")
    if method == "mxfp4":
        return _Scheme((_Group(_ALL, FORMATS["mxfp4"]),), excluded, parts=("experts",))
    kind = _method_format(method, stored)
    if kind is None:
        raise ModelError(
            f"The quantisation {method!r} of config.json is not known.",
            "State the format of its weights with --precision.",
        )
    return _Scheme((*_overrides(stored), _Group(_ALL, kind)), excluded, head=bool(stored.get("lm_head")))


def _method_format(method: str, stored: Mapping[str, Any]) -> Format | None:
    """The format of what the method converts, None if it is not known."""
    if method == "bitsandbytes":
        return FORMATS["nf4" if stored.get("load_in_4bit") or stored.get("_load_in_4bit") else "int8"]
    if method == "quark":
        section = stored.get("global_quant_config")
        return _quark(section if isinstance(section, Mapping) else {})
    if method.startswith("modelopt"):
        algorithm = str(stored.get("quant_algo", "")).upper()
        return next((FORMATS[name] for start, name in _MODELOPT.items() if algorithm.startswith(start)), None)
    if method in ("fp8", "fbgemm_fp8", "ptpc_fp8"):
        return FORMATS["fp8"]
    return _weight_only(stored.get("bits", stored.get("w_bit")))


_MODELOPT = {
    "FP8_PB_WO": "w8a16",
    "FP8": "fp8",
    "MXFP8": "fp8",
    "NVFP4_A16": "nvfp4a16",
    "NVFP4": "nvfp4",
    "MXFP4": "fp4",
    "W4A8_NVFP4_FP8": "w4afp8",
    "W4A8_AWQ": "w4afp8",
    "W4A16": "int4",
    "W8A16": "w8a16",
    "INT8": "int8",
    "INT4": "int4",
}
"""By the beginning of modelopt's quant_algo."""


def _quark(section: Mapping[str, Any]) -> Format | None:
    weight, inputs = section.get("weight"), section.get("input_tensors")
    dtype = str(weight.get("dtype", "")) if isinstance(weight, Mapping) else ""
    kinds = {
        "fp8": ("fp8", "w8a16"),
        "int8": ("int8", "w8a16"),
        "fp4": ("fp4", "mxfp4"),
        "int4": ("w4a8", "int4"),
        "uint4": ("w4a8", "int4"),
    }
    found = next((names for start, names in kinds.items() if dtype.startswith(start)), None)
    return None if found is None else FORMATS[found[0 if isinstance(inputs, Mapping) else 1]]


def _weight_only(bits: Any) -> Format | None:
    """AWQ, GPTQ and their like: products are of 16-bit numbers."""
    return FORMATS.get({"8": "w8a16"}.get(str(bits), f"int{bits}"))


def _groups(sections: Mapping[str, Any]) -> Iterator[_Group]:
    """The groups of compressed-tensors, which modelopt writes too."""
    for name, section in sections.items():
        if not isinstance(section, Mapping) or not isinstance(section.get("weights"), Mapping):
            raise ModelError(f"{name} in quantization_config.config_groups of config.json has no weights.")
        targets = section.get("targets") or [_LINEAR]
        targets = [targets] if isinstance(targets, str) else targets
        yield _Group(_Patterns.of(map(str, targets)), _group_format(name, section))


def _group_format(name: str, section: Mapping[str, Any]) -> Format:
    """By bits and type of weights and of activations; weights alone (W8A16, W4A16) are multiplied as 16 bits."""
    weights, inputs = section["weights"], section.get("input_activations")
    bits, floats = str(weights.get("num_bits")), weights.get("type") == "float"
    inputs = inputs if isinstance(inputs, Mapping) else {"num_bits": 16}
    active = str(inputs.get("num_bits"))
    products = {"4": "fp4", "8": "fp8" if inputs.get("type") == "float" else "int8"}.get(active, "16")
    if (bits, products) == ("4", "fp4") and not floats:
        products = "int8"  # 4-bit integers are widened: no current device multiplies them
    known = {
        ("8", "16"): "w8a16",
        ("8", "fp8"): "fp8",
        ("8", "int8"): "int8",
        ("4", "int8"): "w4a8",
        ("4", "fp8"): "w4afp8",
        ("4", "16"): "int4g32" if str(weights.get("group_size")) == "32" else "int4",
        ("3", "16"): "int3",
        ("2", "16"): "int2",
    }
    if floats and bits == "4" and products in ("16", "fp4"):
        small = str(weights.get("group_size")) == "16"
        known |= {("4", "fp4"): "nvfp4" if small else "fp4", ("4", "16"): "nvfp4a16" if small else "mxfp4"}
    if (bits, products) not in known:
        raise ModelError(
            f"{name} in quantization_config of config.json has weights of {bits} bits with activations of {active}, "
            "which is not known.",
            "State the format of its weights with --precision.",
        )
    return FORMATS[known[bits, products]]


def _patterns(stored: Mapping[str, Any]) -> Iterator[str]:
    """Names of modules that are left alone; GPTQ writes some as keys of `dynamic` that begin with -:."""
    for key in _EXCLUSIONS:
        names = stored.get(key) or ()
        if isinstance(names, str) or not isinstance(names, list | tuple):
            raise ModelError(f"quantization_config.{key} = {names!r} in config.json is no list of modules.")
        yield from (str(name) for name in names)
    dynamic = stored.get("dynamic")
    for pattern in dynamic if isinstance(dynamic, Mapping) else ():
        if str(pattern).startswith("-:"):
            yield f"re:{str(pattern)[2:]}"


def _overrides(stored: Mapping[str, Any]) -> Iterator[_Group]:
    """Modules to which GPTQ's `dynamic` gives other bits."""
    dynamic = stored.get("dynamic")
    for pattern, values in dynamic.items() if isinstance(dynamic, Mapping) else ():
        kind = _weight_only(values.get("bits")) if isinstance(values, Mapping) else None
        if kind is not None and not str(pattern).startswith("-:"):
            yield _Group(_Patterns.of([f"re:{str(pattern).removeprefix('+:')}"]), kind)
