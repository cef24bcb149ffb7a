"""Reads the number formats of a config.json: those of a quantisation, part by part, or of its dtype.

A quantisation names the modules that it leaves alone or the ones that it converts. Each part of a model is asked for by
the names that its modules have in checkpoints; where the layers differ, a part has the format of most of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wager.arch.formats import FORMATS, Format, Precision
from wager.errors import ModelError

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
_LINEAR = "Linear"
"""The class of the modules that a quantisation converts unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The modules that are stored in `stored`: by patterns of their names, or all of the class Linear."""

    targets: tuple[str, ...]
    stored: Format


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A quantisation: `groups` of converted modules and patterns of `excluded` ones.

    `head`: the class Linear includes the LM head. `parts`: the only parts that the method converts (None: all).
    """

    groups: tuple[_Group, ...]
    excluded: tuple[str, ...]
    head: bool = False
    parts: tuple[str, ...] | None = None
    cache: str | None = None

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
        if any(_matches(pattern, name) for pattern in self.excluded):
            return None
        for group in self.groups:
            if any(_matches(target, name) for target in group.targets if target != _LINEAR):
                return group.stored
        return next((group.stored for group in self.groups if by_class and _LINEAR in group.targets), None)


def read_precision(config: Mapping[str, Any], layers: int, *, cache: str | None = None) -> Precision:
    """The number formats of a config.json whose model has that many layers; `cache` that of keys and values where the
    configuration does not state it.

    ModelError names a quantisation that is not known.
    """
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    wide = {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16")
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return Precision.of(wide, cache=cache or "bf16")
    scheme = _read_scheme(stored)
    wide = "bf16" if wide == "fp32" else wide  # what is left alone is served in 16 bits
    formats = {part: scheme.format_of(part, layers) or wide for part in (*_MODULES, "head")}
    if config.get("tie_word_embeddings"):  # the head is the embedding, which is no module of its own
        formats["head"] = wide
    if config.get("expert_dtype") == "fp4":  # DeepSeek-V4 states it beside an fp8 quantisation
        formats["experts"] = FORMATS["fp4"]
    return Precision.of(**formats, embedding=wide, cache=scheme.cache or cache or "bf16")


def _read_scheme(stored: Mapping[str, Any]) -> _Scheme:
    nested = stored.get("quantization")  # hf_quant_config.json of modelopt
    if isinstance(nested, Mapping):
        stored = {"quant_method": "modelopt", **stored, **nested}
    method = str(stored.get("quant_method", "unnamed"))
    excluded = tuple(_patterns(stored))
    cache = "fp8" if _narrow_cache(stored) else None
    if isinstance(stored.get("config_groups"), Mapping):
        head = method == "compressed-tensors"
        return _Scheme(tuple(_groups(stored["config_groups"])), excluded, head=head, cache=cache)
    if method == "mxfp4":
        return _Scheme((_Group((_LINEAR,), FORMATS["mxfp4"]),), excluded, parts=("experts",))
    kind = _format(method, stored)
    if kind is None:
        raise ModelError(
            f"The quantisation {method!r} of config.json is not known.",
            "State the format of its weights with --precision.",
        )
    overrides = tuple(_overrides(stored))
    return _Scheme((*overrides, _Group((_LINEAR,), kind)), excluded, head=bool(stored.get("lm_head")), cache=cache)


def _format(method: str, stored: Mapping[str, Any]) -> Format | None:
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
        yield _Group(tuple(str(target) for target in targets), _group_format(name, section))


def _group_format(name: str, section: Mapping[str, Any]) -> Format:
    """By bits and type of weights and of activations; weights alone (W8A16, W4A16) are multiplied as 16 bits."""
    weights, inputs = section["weights"], section.get("input_activations")
    bits, floats = str(weights.get("num_bits")), weights.get("type") == "float"
    active = str(inputs.get("num_bits")) if isinstance(inputs, Mapping) else "16"
    products = {"4": "fp4", "8": "fp8" if _is_float(inputs) else "int8"}.get(active, "16")
    if (bits, products) == ("4", "fp4") and not floats:
        products = "int8"  # 4-bit integers are widened: no current device multiplies them
    known = {
        ("8", "16"): "w8a16",
        ("8", "fp8"): "fp8",
        ("8", "int8"): "int8",
        ("4", "int8"): "w4a8",
        ("4", "fp8"): "w4afp8",
        ("4", "16"): "int4",
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


def _is_float(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("type") == "float"


def _narrow_cache(stored: Mapping[str, Any]) -> bool:
    """Whether keys and values are cached in 8 bits."""
    scheme = stored.get("kv_cache_scheme")
    named = str(stored.get("kv_cache_quant_algo") or "").upper()
    return named in ("FP8", "INT8") or (isinstance(scheme, Mapping) and str(scheme.get("num_bits")) == "8")


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
            yield _Group((f"re:{str(pattern).removeprefix('+:')}",), kind)


def _matches(pattern: str, name: str) -> bool:
    """Whether the pattern names the module: a regular expression after re:, else a name or a part of it between dots
    (`gate` is not gate_proj), with * for anything."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise ModelError(f"quantization_config has the pattern {pattern!r}: {error}.") from error
    plain = re.escape(pattern.strip(".").removeprefix("model.").removeprefix("language_model.").removeprefix("model."))
    return re.search(rf"(^|\.){plain}(\.|$)".replace(r"\*", ".*"), name) is not None
