"""`wager export`: a drafter in the form that another engine loads, compared with its source.

What the engines read is from their sources: vLLM 0.33.0 (model_executor/models/{llama_eagle3,qwen3_dflash,
qwen3_dspark,mimo_mtp,deepseek_mtp}.py, transformers_utils/configs/speculators), SGLang 0.5.23 (srt/models/
{llama_eagle3,dflash,dspark,mimo_mtp,deepseek_nextn,qwen3_moe_mtp}.py), transformers 5.23 (generation/
candidate_generator.py) and llama.cpp b11549 (src/models/{eagle3,dflash}.cpp). docs/train.md has it in words.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import click
import numpy as np

from wager.arch.spec import ModelSpec
from wager.config import EngineConfig
from wager.drafter_spec import DrafterSpec
from wager.errors import ModelError, UsageError
from wager.inputs import expand_path, shown
from wager.kernels.arrays import BFLOAT16, FLOAT32
from wager.loading.heads import Checked, open_head
from wager.loading.opened import OpenedModel, open_draft, open_target
from wager.models.gguf import open_gguf
from wager.models.head_block import CheckedBlock
from wager.models.head_eagle import CheckedEagle
from wager.models.head_files import CheckedLayers, HeadFiles
from wager.models.head_gguf import write_head
from wager.models.head_mtp import FORMATS, CheckedMtp
from wager.models.hub import head_path
from wager.models.safetensors_files import TensorBytes, write_tensors
from wager.planner.export import ENGINES, OtherEngine
from wager.terminal import console, flags

_ENGINES = {
    **{name: ENGINES[name] for name in ("vllm", "sglang")},
    "transformers": OtherEngine("transformers 5.23", {"model": "assistant_model"}, {}),
    "llama.cpp": replace(
        ENGINES["llama.cpp"], methods={kind: f"draft-{kind}" for kind in ("eagle3", "dflash", "dspark")}
    ),
}

_MODULES = {
    "vllm": {"MiMoForCausalLM": "MiMo", "DeepseekV3ForCausalLM": "DeepSeek"},
    "sglang": {"MiMoForCausalLM": "MiMo", "DeepseekV3ForCausalLM": "DeepSeek", "Qwen3MoeForCausalLM": "Qwen"},
}
"""Formats of MTP modules that an engine knows, by the target's architecture, of targets that wager runs."""

_MIMO_LAYERS = "qwen2"
"""What MiMo's configurations are like. Of its own model_type transformers knows nothing; the class is code in MiMo's
folder, which does not go with the modules. Engines know MiMo by its architecture."""

_NO_EMBEDDINGS = "it reads the target's embeddings (layer 0), for which SGLang has no layer id"

_BESIDE = r"(tokenizer|special_tokens|added_tokens|vocab|merges|generation_config|chat_template).*"
"""Files that go with a drafter as they are."""

_LEFT_OUT = {"quantization_config", "auto_map"}
"""Keys that do not go with a drafter: its matrices are written in floats, and its files of code stay where they are."""

_STORAGE = {"files", "outputs", "own_output"}
"""Fields of a head that say how it is stored."""

_DEPTH = 3
"""Guesses of a round where a drafter does not say how many it was made for."""

_LLAMA_CPP_TAPS = 3
"""Taps that llama.cpp's loader of EAGLE-3 heads demands."""


@click.command("export", cls=flags.Verb)
@click.argument("head", metavar="HEAD")
@click.option("--to", "engine", type=click.Choice(list(_ENGINES)), required=True, help="The engine that shall load it.")
@click.option("-o", "--output", required=True, metavar="FOLDER", help="Folder to write: a new one, or empty.")
@flags.engine_flags(only=("model",))
@flags.json_flag
def command(*, head: str, engine: str, output: str, config: EngineConfig, json_path: Path | None) -> None:
    """Write a drafter of --model in the form that another engine loads, and check it.

    HEAD is a folder that `wager train` wrote or wager reads: an EAGLE-3, DFlash or DSpark head, MTP modules, or
    a draft model; or the name of a model whose head comes with wager. What was quantised is written in bfloat16, for
    llama.cpp in the file's types. What was written is read back and compared with HEAD, tensor by tensor.
    What the engine cannot load is refused.
    """
    folder = expand_path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output {shown(output)} is there already.", "Give a folder that is new or empty.")
    source = _opened(head_path(head), engine, config)
    try:
        if engine == "llama.cpp":
            written, tensors = _write_gguf(source, folder)
        else:
            form, written = _FORMS[source.kind](source), folder
            _write(source, form, folder)
            tensors = len(form.names) + len(form.further)
    except BaseException:  # what is not whole, or not as the source, is of no use, and in the way of another attempt
        for path in folder.glob("*"):
            path.unlink()
        raise
    calls = _command(source, written)
    read = "read back and compared"
    if source.files.quantised and engine != "llama.cpp":
        read += f" ({len(source.files.quantised)} of them were quantised, and are in bfloat16 now)"
    figures = {"head": str(source.path), "kind": source.kind, "engine": _ENGINES[engine].name, "output": str(written)}
    console.write_json({**figures, "tensors": tensors, "command": calls}, json_path)
    if json_path != console.STDOUT:
        click.echo(f"{written}: {source.kind} for {_ENGINES[engine].name}, {tensors} tensors, {read}")
        if calls:
            click.echo(shlex.join(calls))


@dataclass(frozen=True)
class _Source:
    """A drafter whose files were checked. `kind`: as `--drafter` names it, but for DSpark; `head`: None of a model."""

    path: Path
    kind: str
    files: HeadFiles
    head: Checked | None
    engine: str
    config: EngineConfig
    target: OpenedModel

    @property
    def drafter(self) -> str:
        """The kind as `--drafter` names it."""
        return "dflash" if self.kind == "dspark" else self.kind

    @property
    def depth(self) -> int:
        """Guesses of a round."""
        return (self.head.depth if self.head else None) or _DEPTH

    @property
    def of_mimo(self) -> bool:
        """Whether it is modules of a MiMo model."""
        return isinstance(self.head, CheckedMtp) and self.head.format.name == "MiMo"

    def refuse(self, why: str, hint: str = "Use another engine, or another drafter.") -> NoReturn:
        raise UsageError(f"{_ENGINES[self.engine].name} cannot load {self.path}: {why}.", hint)

    def matrix(self, *, embedding: bool = False, rows: Any = slice(None)) -> TensorBytes:
        """The target's embedding or output matrix, or `rows` of it, in bfloat16."""
        name = "embed.weight" if embedding or self.target.spec.tied else "head.weight"
        values = self.target.weights.read(name, BFLOAT16)[rows]
        return TensorBytes("BF16", values.shape, values.tobytes())


def _opened(path: Path, engine: str, config: EngineConfig) -> _Source:
    """ModelError for what is no drafter of this target, UsageError for a kind that the engine does not have."""
    if path.is_file():
        raise UsageError(f"{path} is a file: heads are exported from directories.", "Give the head's directory.")
    target, files = open_target(config), HeadFiles(path)
    kind, head = _kind(files.shapes), None
    if kind == "model":
        open_draft(config, target, str(path))
    else:
        head = open_head(DrafterSpec(kind, str(path)), target).head
        kind = "dspark" if getattr(head, "markov_rank", 0) else kind
    source = _Source(path, kind, head.files if head else files, head, engine, config, target)
    if kind not in _ENGINES[engine].methods:
        source.refuse(f"it has no loader for {kind}")
    return source


def _kind(names: Iterable[str]) -> str:
    """A drafter by tensors that no other kind has."""
    marks = {
        "mtp": "|".join(known.found for known in FORMATS),
        "eagle3": r"(model\.)?(midlayer|layers\.0)\.hidden_norm\.weight",
        "dflash": r"(model\.)?hidden_norm\.weight",
        "medusa": r"(medusa_heads\.|blocks\.)?0\.(layers\.)?0\.(linear\.)?weight",
    }
    return next((kind for kind, mark in marks.items() if any(re.fullmatch(mark, name) for name in names)), "model")


# ---- the forms of the engines ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """config.json; `names`: wager's name of each tensor to the engine's; `further`: what the engine wants to find
    besides, of the target; `changed`: fields of the head that read otherwise, as the engine counts layers otherwise."""

    config: dict[str, Any]
    names: Mapping[str, str]
    further: Mapping[str, TensorBytes] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)


def _mtp(source: _Source) -> _Form:
    head, spec = cast(CheckedMtp, source.head), source.target.spec
    known, form = _MODULES[source.engine], head.format
    if known.get(spec.details.architecture) != form.name:
        source.refuse(
            f"it knows no MTP modules in the format of {form.name} for {spec.details.architecture}",
            f"It knows those of {', '.join(known)}.",
        )
    embedding, output = source.matrix(embedding=True), source.matrix()
    further = {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    for module in range(head.modules if form.name == "DeepSeek" else 0):
        layer = f"model.layers.{spec.num_layers + module}"
        for part, name, value in (("embed", "embed_tokens", embedding), ("head", "shared_head.head", output)):
            if f"modules.{module}.{part}.weight" not in head.files.shapes:
                further[f"{layer}.{name}.weight"] = value
    names = {name: head.files.names[name] for name in head.tensors()}
    own = {"model_type": _MIMO_LAYERS, "_name_or_path": head.decoder.name} if source.of_mimo else {}
    return _Form({**head.files.config, **own, form.count: head.modules}, names, further)


def _output_rows(source: _Source, head: CheckedLayers) -> dict[str, TensorBytes]:
    """The rows of the target's output matrix that a head of fewer tokens guesses with, where it has none of its own."""
    if head.own_output or head.vocabulary.whole:
        return {}
    return {"lm_head.weight": source.matrix(rows=head.vocabulary.ids)}


def _eagle(source: _Source) -> _Form:
    """SGLang's is flat, its residual stream is the state itself, and it counts layers from the one behind the first."""
    head = cast(CheckedEagle, source.head)
    further = _output_rows(source, head)
    if source.engine == "vllm":
        return _Form(dict(head.files.config), head.files.names, further)
    if head.norm_before_residual:
        source.refuse("its residual stream is the normed state (norm_before_residual), which SGLang does not have")
    if head.own_embedding:
        source.refuse("it has an embedding of its own, and SGLang gives EAGLE-3 heads the target's")
    if head.decoder.details.qk_norm or head.decoder.details.qkv_bias:
        source.refuse("its layers have norms or biases of queries and keys, which SGLang's EAGLE-3 layers have not")
    if 0 in head.taps:
        source.refuse(_NO_EMBEDDINGS)
    taps, layers = head.taps, source.target.spec.num_layers
    shifted = () if taps == (2, layers // 2, layers - 3) else tuple(tap - 1 for tap in taps)
    named = {"eagle_aux_hidden_state_layer_ids": list(shifted)} if shifted else {}
    config = _flat(source) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(head.vocabulary.ids) if head.own_output or further else None,
        "target_hidden_size": head.target_hidden,
        "num_aux_hidden_states": len(taps),
        "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": head.norm_before_fc, **named},
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
    }
    names = {name: re.sub(r"^layers\.0\.", "midlayer.", name) for name in head.files.shapes}
    return _Form(config, names, further, {"taps": shifted} if shifted else {})


def _block(source: _Source) -> _Form:
    """SGLang's is flat, and has the target's embedding and output matrix."""
    head = cast(CheckedBlock, source.head)
    if source.engine == "vllm":
        return _Form(dict(head.files.config), head.files.names, _output_rows(source, head))
    if head.own_embedding or head.own_output or not head.vocabulary.whole:
        source.refuse(
            f"SGLang gives {source.kind} drafters the target's embedding and output matrix, and it has its own, or "
            "guesses a part of the tokens"
        )
    if 0 in head.taps:
        source.refuse(_NO_EMBEDDINGS)
    if not head.decoder.details.qk_norm:
        source.refuse(f"its layers lack the norms of queries and keys that SGLang's {source.kind} layers have")
    if head.anchor_guesses and source.kind == "dflash":
        source.refuse("its first slot guesses too, which it does in no DFlash drafter of SGLang")
    if source.kind == "dspark" and not head.confidence:
        source.refuse("it has no confidence head, which SGLang's DSpark loader requires")
    taps = [tap - 1 for tap in head.taps]
    config = _flat(source) | {
        "architectures": ["DFlashDraftModel" if source.kind == "dflash" else "Qwen3DSparkModel"],
        "block_size": head.slots,
        "num_target_layers": source.target.spec.num_layers,
        "dflash_config": {"mask_token_id": head.mask_token, "target_layer_ids": taps},
        "target_layer_ids": taps,
        "sample_from_anchor": head.anchor_guesses,
        "enable_confidence_head": head.confidence,
        "confidence_head_with_markov": head.confidence_reads_markov,
        "markov_rank": head.markov_rank,
        "markov_head_type": "vanilla",
    }
    return _Form(config, {name: name for name in head.files.shapes})


def _flat(source: _Source) -> dict[str, Any]:
    """The keys of a head's layers, and the guesses that it was made for, which wager reads."""
    made_for = source.files.config.get("speculators_config")
    layer = {**source.files.layer_keys.values, "tie_word_embeddings": False, "speculators_config": made_for or {}}
    return {key: value for key, value in layer.items() if key != "eagle_aux_hidden_state_layer_ids"}


_FORMS: Mapping[str, Callable[[_Source], _Form]] = {
    "eagle3": _eagle,
    "mtp": _mtp,
    "dflash": _block,
    "dspark": _block,
    "model": lambda source: _Form(dict(source.files.config), source.files.names),
}


# ---- writing and reading back ----------------------------------------------------------------------------------------


def _write_gguf(source: _Source, folder: Path) -> tuple[Path, int]:
    """Write a head as a GGUF file in the folder, read it and compare it; where it is, and its tensors."""
    head = cast(CheckedEagle | CheckedBlock, source.head)
    target, details, rope = source.target.path, head.decoder.details, head.decoder.details.rope
    if not target.is_file():
        source.refuse("its file repeats the tokenizer of the target's GGUF file", "Give that file as --model.")
    if rope.magnitude != 1 or rope.long_factors or (rope.factors and source.kind != "eagle3"):
        source.refuse("its rotation is scaled in a way that the file cannot state")
    if isinstance(head, CheckedEagle):
        if head.fc_norm or head.norm_output:
            source.refuse(
                "it norms every tap (fc_norm) or feeds back what is normed (norm_output)",
                "Train one with `wager train --no-state-norms`, or a DSpark head with --kind dspark.",
            )
        if len(head.taps) != _LLAMA_CPP_TAPS or head.decoder.num_layers > 1 or details.qk_norm or details.qkv_bias:
            source.refuse(
                "its EAGLE-3 heads have three taps and one layer without norms and biases of queries and keys"
            )
    elif not details.qk_norm or head.decoder.hidden != head.target_hidden:
        source.refuse("its layers must be as wide as the target's, with norms of queries and keys")
    elif head.anchor_guesses and not head.markov_rank:
        source.refuse("its first slot guesses too, which llama.cpp knows of DSpark heads alone")
    elif head.confidence and not (head.markov_rank and head.confidence_reads_markov):
        source.refuse("its confidence head does not read a Markov head, as llama.cpp's do")
    path, output = folder / f"{target.stem}-{source.kind}.gguf", _output_rows(source, head).get("lm_head.weight")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_head(path, head, open_gguf(target), output=output)
    except OSError as error:
        raise UsageError(f"--output {shown(str(folder))} cannot be written: {error.strerror}.") from error
    found = cast(CheckedEagle | CheckedBlock, open_head(DrafterSpec(source.drafter, str(path)), source.target).head)
    _compare(source, head, found, path, {}, apart=_STORAGE | {"decoder", "depth"})
    if not _same_layers(head.decoder, found.decoder):
        raise ModelError(f"The layers in {path} are read as others than those in {source.path}.")
    for name in found.files.shapes.keys() - {"d2t", "lm_head.weight" if output else ""}:
        if not _same_values(head.files, found.files, name):
            raise ModelError(f"{name} in {path} differs from that in {source.path}.")
    return path, len(open_gguf(path).tensors)


def _same_values(files: HeadFiles, written: HeadFiles, name: str) -> bool:
    """Whether a tensor has the bits that it had: codes and scales, with minima rounded to 16 bits, or floats."""
    if written.stored(name).format is None:
        rounded = files.names[name] in files.quantised
        return np.array_equal(written.read(name), files.read(name, BFLOAT16 if rounded else FLOAT32))
    own, its = (each.read_blocks(name).codes() for each in (files, written))
    same = np.array_equal(own.values, its.values) and np.array_equal(own.scales, its.scales)
    if own.minima is None or its.minima is None:
        return same and own.minima is its.minima
    return same and np.array_equal(own.minima.astype(np.float16), its.minima)


def _same_layers(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether layers compute the same: numbers in a file have 32 bits."""

    def values(spec: ModelSpec) -> tuple[Any, ...]:
        numbers = [spec.details.norm_eps, spec.details.rope.theta, *spec.details.rope.factors]
        return spec.hidden, spec.vocab, spec.context, spec.ordered_layers, np.array(numbers, np.float32).tolist()

    return values(one) == values(other)


def _compare(
    source: _Source, wanted: Checked, found: Checked, path: Path, changed: Mapping[str, Any], *, apart: Collection[str]
) -> None:
    """ModelError where a field of a head, but those `apart`, is read as another, or not as `changed` says."""
    for name in {each.name for each in fields(wanted)} - set(apart):
        own = changed.get(name, getattr(wanted, name))
        read = getattr(found, name)
        if not (np.array_equal(read.ids, own.ids) if name == "vocabulary" else read == own):
            raise ModelError(f"{name} is read from {path} as {read}, and is {own} in {source.path}.")


def _write(source: _Source, form: _Form, folder: Path) -> None:
    """Write all files and read them with wager's own readers. ModelError where something differs from the source."""
    tensors = {stored: source.files.read_bytes(name) for name, stored in form.names.items()}
    noted = {**source.files.config.get("wager", {}), **form.changed}
    config = {key: value for key, value in form.config.items() if key not in _LEFT_OUT}
    config |= {"wager": noted} if noted else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "model.safetensors", {**tensors, **form.further})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in source.path.iterdir():
            if re.fullmatch(_BESIDE, file.name):
                shutil.copy(file, folder)
    except OSError as error:
        raise UsageError(f"--output {shown(str(folder))} cannot be written: {error.strerror}.") from error
    written = HeadFiles(folder)
    if source.head is not None:
        found = open_head(DrafterSpec(source.drafter, str(folder)), source.target).head
        written = found.files
        _compare(source, source.head, found, folder, form.changed, apart=_STORAGE)
    for name in form.names:
        if written.read_bytes(name) != source.files.read_bytes(name):
            raise ModelError(f"{name} in {folder} differs from that in {source.path}.")


def _command(source: _Source, written: Path) -> list[str]:
    """How a server is started with what was written; empty for transformers, whose `generate(assistant_model=...)`
    takes it."""
    method, depth, target = _ENGINES[source.engine].methods[source.kind], source.depth, str(source.target.path)
    if source.engine == "transformers":
        return []
    code = ["--trust-remote-code"] if source.of_mimo else []  # the target's configuration: see _MIMO_LAYERS
    if source.engine == "vllm":
        config = {"method": method, "model": str(written), "num_speculative_tokens": depth}
        return ["vllm", "serve", target, *code, "--speculative-config", json.dumps(config)]
    if source.engine == "llama.cpp":
        words = {"spec-type": method, "spec-draft-model": written, "spec-draft-n-max": depth}
        return [
            "llama-server",
            "-m",
            target,
            *(word for name, value in words.items() for word in (f"--{name}", str(value))),
        ]
    sizes = {"num-steps": depth, "eagle-topk": 1, "num-draft-tokens": depth + 1}
    sizes = {"dflash": {"num-draft-tokens": depth + 1}, "dspark": {"dspark-block-size": depth}}.get(source.kind, sizes)
    words = {"algorithm": method, "draft-model-path": written, **sizes}
    given = [word for name, value in words.items() for word in (f"--speculative-{name}", str(value))]
    return ["python", "-m", "sglang.launch_server", "--model-path", target, *code, *given]
