"""Modules of multi-token prediction (DeepSeek-V3, arXiv 2412.19437): how each format names their tensors, and what they
compute.

A module reads the embedding of a token beside the state of the position before it, has one layer like its target's,
and guesses the token after. Formats differ in names, in which of both comes first, and in which state is handed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from wager.arch.config_keys import ConfigKeys
from wager.arch.hf_config import read_config
from wager.arch.layers import Dense, Experts
from wager.arch.spec import Layer, ModelSpec
from wager.errors import ModelError
from wager.models.head_eagle_spec import check_sizes, read_proposed
from wager.models.head_files import HeadFiles
from wager.models.tensors import checkpoint_names, source_name, tensor_shapes

_MOST_MODULES = 16


@dataclass(frozen=True, slots=True)
class MtpFormat:
    """`layers` is a pattern of the beginning of a module's tensors, with its number; `found` one of a name that only
    modules have; `parts` patterns of the tensors around the layer and what they are called here: enorm and hnorm (norms
    of embedding and state), proj (their projection), norm (the last norm), head and embed (matrices of its own).

    shared: all modules have those of the first. hidden_first: the projection's first columns are the state's. zeroed:
    the first position's embedding is zero. after_norm: the state is the one behind the target's last norm. count: the
    configuration's key that has the number of modules.
    """

    name: str
    layers: str
    found: str
    parts: Mapping[str, str]
    shared: bool = False
    hidden_first: bool = False
    zeroed: bool = False
    after_norm: bool = True
    count: str = "num_nextn_predict_layers"


_MIMO_PARTS = {
    r"(modules\.\d+)\.token_layernorm\.": r"\1.enorm.",
    r"(modules\.\d+)\.hidden_layernorm\.": r"\1.hnorm.",
    r"(modules\.\d+)\.input_proj\.": r"\1.proj.",
    r"(modules\.\d+)\.final_layernorm\.": r"\1.norm.",
}

FORMATS = (
    MtpFormat(
        "DeepSeek",
        r"model\.layers\.(\d+)\.",
        r"model\.layers\.(\d+)\.(?:enorm|hnorm|eh_proj|shared_head)\..*",
        {
            r"(modules\.\d+)\.eh_proj\.": r"\1.proj.",
            r"(modules\.\d+)\.shared_head\.norm\.": r"\1.norm.",
            r"(modules\.\d+)\.shared_head\.head\.": r"\1.head.",
            r"(modules\.\d+)\.embed_tokens\.": r"\1.embed.",
        },
        zeroed=True,
    ),
    MtpFormat(
        "Qwen",
        r"mtp\.layers\.(\d+)\.",
        r"mtp\..*",
        {
            r"mtp\.pre_fc_norm_embedding\.": "modules.0.enorm.",
            r"mtp\.pre_fc_norm_hidden\.": "modules.0.hnorm.",
            r"mtp\.fc\.": "modules.0.proj.",
            r"mtp\.norm\.": "modules.0.norm.",
        },
        shared=True,
        count="mtp_num_hidden_layers",
    ),
    MtpFormat(
        "speculators",
        r"mtp_layers\.(\d+)\.",
        r"mtp_layers\..*",
        {**_MIMO_PARTS, r"lm_head\.": "modules.0.head.", r"embed_tokens\.": "modules.0.embed."},
        after_norm=False,
    ),
    MtpFormat(
        "MiMo",
        r"model\.mtp_layers\.(\d+)\.",
        r"model\.mtp_layers\..*",
        _MIMO_PARTS,
        hidden_first=True,
        zeroed=True,
    ),
)


@dataclass(frozen=True)
class MtpSpec:
    """What the modules of a target are. `decoder` has as many layers as there are modules, all of the same shape;
    `depth`: guesses of a round that they were made for. The flags are those of MtpFormat."""

    decoder: ModelSpec
    shared: bool
    hidden_first: bool
    zeroed: bool
    after_norm: bool
    depth: int | None = None

    @property
    def modules(self) -> int:
        return self.decoder.num_layers

    @property
    def layer(self) -> Layer:
        return self.decoder.layers[0]


def find_format(files: HeadFiles) -> MtpFormat | None:
    """The format of the modules in some files; None if there are none."""
    return next((known for known in FORMATS if any(re.fullmatch(known.found, name) for name in files.shapes)), None)


def read_mtp(files: HeadFiles, target: ModelSpec, *, inside: bool, after_norm: bool | None = None) -> MtpSpec:
    """The modules in the files; the names and shapes of all their tensors are checked. `inside`: they are the target's
    own files; `after_norm` overrides the format's. ModelError names what does not fit, and what is not supported."""
    known = find_format(files)
    if known is None:
        raise ModelError(
            f"{files.where} has no MTP weights: no tensor is named as in modules of DeepSeek (model.layers.N.eh_proj), "
            "Qwen (mtp.fc), MiMo (model.mtp_layers.0.input_proj) or speculators (mtp_layers.0.input_proj).",
            "Give a directory that has them, mtp:PATH, or another drafter.",
        )
    kind = files.keys.text("speculators_model_type")
    if kind not in (None, "mtp"):
        raise ModelError(f"The head in {files.where} is a {kind} head.", "MTP modules are wanted here.")
    count = _rename(files, known)
    base = target if inside else _read_base(files, target)
    ffn = _feed_forward(files, base.ordered_layers[-1])
    layers = (replace(base.ordered_layers[-1], ffn=ffn, count=count),)
    decoder = replace(base, layers=layers, tied=True, decoder=replace(base.details, layer_order=(0,) * count))
    spec = MtpSpec(
        decoder,
        known.shared,
        known.hidden_first,
        known.zeroed,
        known.after_norm if after_norm is None else after_norm,
        None if inside else read_proposed(files.keys),
    )
    others = r"(?!modules\.).*" if inside else r"(model|lm_head)\..*|.*rotary_emb\.inv_freq|verifier_.*"
    files.check(dict(_tensors(spec, files)), optional=(others,))
    return spec


def layer_names(spec: ModelSpec) -> Mapping[str, str]:
    """The names of the layers' tensors, as tensors.NAMES has them."""
    names = checkpoint_names(spec.details.architecture)
    return {part: name.replace("model.layers.", "modules.") for part, name in names.items()}


def _rename(files: HeadFiles, known: MtpFormat) -> int:
    """Let the tensors be called modules.N., numbered from 0, and return how many modules there are."""
    names = [match for name in files.shapes if (match := re.match(known.layers, name))]
    numbered = [match for name in files.shapes if (match := re.fullmatch(known.found, name)) and match.groups()]
    numbers = {int(match[1]) for match in numbered or names} or {0}
    first = min(numbers)
    count = len(numbers)
    stated = files.keys.count(known.count, default=count, most=_MOST_MODULES)
    if stated != count:
        raise ModelError(
            f"{known.count} in {files.keys.where} is {stated}, and its files have {count} MTP modules.",
            "The files are incomplete, or do not belong together.",
        )
    files.rename({known.layers.replace(r"(\d+)", str(first + i)): f"modules.{i}." for i in range(count)})
    files.rename(known.parts)
    return count


def _read_base(files: HeadFiles, target: ModelSpec) -> ModelSpec:
    """The model whose last layer is shaped as the modules', by the configuration beside them."""
    keys = files.keys
    layer = keys.section("transformer_layer_config") if "transformer_layer_config" in files.config else keys
    base = read_config(layer.values, runnable=True, where=f"{files.where}/config.json")
    sizes = ConfigKeys({"target_hidden_size": base.hidden, "vocab_size": base.vocab})
    check_sizes(files, sizes, sizes, target)
    return base


def _feed_forward(files: HeadFiles, layer: Layer) -> Dense | Experts:
    """A dense one where the module has it, else what the target's last layer has."""
    shapes = files.shapes
    if any(name.endswith("experts.gate_up_proj") for name in shapes if name.startswith("modules.")):
        raise ModelError(
            f"The experts of the MTP modules in {files.where} are fused (experts.gate_up_proj), which is not "
            "supported.",
            "Split them into experts.N.gate_proj, up_proj and down_proj.",
        )
    gate = shapes.get("modules.0.mlp.gate_proj.weight")
    return Dense(gate[0]) if gate else layer.ffn


def _tensors(spec: MtpSpec, files: HeadFiles) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab, names = spec.decoder.hidden, spec.decoder.vocab, layer_names(spec.decoder)
    for module in range(1 if spec.shared else spec.modules):
        for part, shape in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("norm", (hidden,))):
            yield f"modules.{module}.{part}.weight", shape
        yield f"modules.{module}.proj.weight", (hidden, 2 * hidden)
        for part in ("head", "embed"):
            if (name := f"modules.{module}.{part}.weight") in files.shapes:
                yield name, (vocab, hidden)
    for name, size in tensor_shapes(spec.decoder).items():
        if name.startswith("layers."):
            yield source_name(names, name), size
