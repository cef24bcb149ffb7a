"""Heads in GGUF files of their own: they guess as those in directories, and what does not belong together is refused
with a sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blank_heads import block_head, eagle_head
from decoder_engines import decoder_on
from eagle_heads import VARIANTS as EAGLES
from gguf import GGMLQuantizationType as Kind
from gguf_heads import head_gguf
from mixture_files import mixture_gguf
from mtp_modules import LAYERS, ReferenceModules
from mtp_modules import VARIANTS as MODULES
from test_block_heads import KINDS as BLOCKS
from test_block_heads import TARGET as BLOCK_TARGET
from test_block_heads import WEIGHTS as BLOCK_WEIGHTS
from test_block_heads import ReferenceBlock
from test_cached_heads import TARGET, reference_of
from tiny_models import TOKENS
from tokenizer_models import gguf_metadata as tokenizer_metadata
from tokenizer_models import train

from closeness import assert_close
from oracle.kernels import ReferenceKernels
from packing import batch, chain
from wager.arch.gguf_config import read_gguf
from wager.cli import main
from wager.drafter_spec import DrafterSpec
from wager.errors import ModelError
from wager.kernels.arrays import Array
from wager.kernels.cpu import Kernels
from wager.models.companions import companion_modules, drafter_fingerprint, drafters_of
from wager.models.gguf import open_gguf
from wager.models.head_block import open_block
from wager.models.head_eagle import open_eagle
from wager.models.head_files import HeadFiles
from wager.models.head_gguf import open_head_files
from wager.models.opening import open_model
from wager.models.random_models import RandomWeights

MODEL = "random:llama:tiny"
RNG = np.random.default_rng(3)
WRITTEN = [
    name
    for name, flags in EAGLES.items()
    if flags.layers == 1 and not (flags.fc_norm or flags.norm_output or flags.bias)
]
"""The heads that llama.cpp has a loader for."""


def eagle_rows(path: Path, *, dtype: str = "bf16", kernels: Kernels | None = None) -> tuple[Array, Array]:
    """The logits and tokens of a head behind known rows and one that it is fed."""
    weights = RandomWeights(TARGET, 1)
    opened = open_eagle(open_head_files(path), TARGET, dtype=dtype)
    head = opened.load(decoder_on(weights, kernels or ReferenceKernels("float32")), weights, num_blocks=8)
    states = np.random.default_rng(1).standard_normal((7, head.state_width)).astype(np.float32)
    fed = np.random.default_rng(2).standard_normal((1, head.hidden)).astype(np.float32)
    rows = [chain(0, TOKENS[:7], [3]), chain(9, TOKENS[7:8], [5])]
    output = head.forward(batch(rows, [3, 6, 7]), states, fed)
    return output.logits.copy(), output.tokens.copy()


@pytest.mark.parametrize("name", WRITTEN)
def test_eagle_heads_give_the_same_bits_from_both_containers(name: str, tmp_path: Path) -> None:
    """Rotated pairs lie side by side in the file, and d2t has ids in place of distances."""
    folder = reference_of(EAGLES[name], RandomWeights(TARGET, 1)).save(tmp_path / "head")
    file = head_gguf(folder, tmp_path / "head.gguf", layers=TARGET.num_layers)
    for one, other in zip(eagle_rows(folder), eagle_rows(file), strict=True):
        assert np.array_equal(one, other)


def test_an_older_file_says_its_taps_by_another_key(tmp_path: Path) -> None:
    folder = reference_of(EAGLES["speculators"], RandomWeights(TARGET, 1)).save(tmp_path / "head")
    changes = {"target_layers": None, "extract_layers": [0, 2, 3]}
    file = head_gguf(folder, tmp_path / "head.gguf", layers=TARGET.num_layers, **changes)
    assert open_eagle(open_head_files(file), TARGET, dtype="bf16").taps == (0, 2, 3)


def block_rows(path: Path) -> tuple[Array, Array, tuple[int, ...]]:
    opened = open_block(open_head_files(path), BLOCK_TARGET, dtype="bf16")
    head = opened.load(decoder_on(BLOCK_WEIGHTS, ReferenceKernels("float32")), BLOCK_WEIGHTS, num_blocks=8)
    states = np.random.default_rng(1).standard_normal((7, head.state_width)).astype(np.float32)
    head.extend(batch([chain(0, TOKENS[:7], [3])], []), states)
    tokens = [TOKENS[7], *head.masks]
    packed = batch([(7, tokens, range(-1, len(tokens) - 1), [3])], [])
    head.context_buffers  # noqa: B018
    head._tape.inputs.fill(packed)
    head.run(packed)
    guessed, rates = head.chains([TOKENS[7]], head.max_depth)
    return guessed.copy(), np.array(rates), head.taps


@pytest.mark.parametrize("name", BLOCKS)
def test_block_heads_give_the_same_guesses_from_both_containers(name: str, tmp_path: Path) -> None:
    folder = ReferenceBlock(BLOCKS[name]).save(tmp_path / "head")
    file = head_gguf(folder, tmp_path / "head.gguf", layers=BLOCK_TARGET.num_layers)
    (tokens, rates, taps), (others, sure, layers) = block_rows(folder), block_rows(file)
    assert taps == layers and np.array_equal(tokens, others) and np.array_equal(rates, sure)


def test_matrices_keep_the_bits_of_the_file(tmp_path: Path) -> None:
    """Where they have no more than are wanted; a projection is cut between its blocks."""
    spec = open_model(MODEL)[1].spec
    folder = eagle_head(tmp_path / "head", spec)
    file = head_gguf(folder, tmp_path / "head.gguf", layers=spec.num_layers, kind=Kind.Q4_0)
    for dtype, kept in (("q8", "q4_0"), ("q4", "q4_0"), ("bf16", None)):
        opened = open_eagle(open_head_files(file), spec, dtype=dtype)
        weights = opened.weights(Kernels())
        name = "layers.0.self_attn.q_proj.weight"
        assert weights.kept(name) == kept
        packed = weights.pack([name], slice(spec.hidden, None))
        assert packed.k == spec.hidden
        if kept is not None:
            assert opened.weight_bytes(Kernels()) < open_eagle(HeadFiles(folder), spec, dtype="q8").weight_bytes(
                Kernels()
            )


# ---- through the command line --------------------------------------------------------------------------------------


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command says, which ends with that code."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("wager"), "handlers", [])  # those of another test write to what it has closed

    def run(*arguments: str, code: int = 1) -> str:
        assert main(list(arguments)) == code, capfd.readouterr()
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err
        return printed.out + printed.err

    return run


SHORT = ("--threads", "1", "--memory", "64MiB", "--max-tokens", "12", "--limit", "2")


def hybrid(folder: Path, name: str = "qwen3.5-experts", *, tokens: bool = True) -> dict[str, Path]:
    """A target with modules as GGUF: whole, and the model and its modules apart, as publishers have them."""
    tokenizer, variant = train("gpt-2"), MODULES[name]
    config = {**variant.config, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
    source = ReferenceModules(replace(variant, config=config)).save_target(folder / "source")
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    written = tokenizer_metadata(tokenizer, "gpt-2") if tokens else {}
    made = {"whole": folder / "whole" / "Tiny-Q8_0.gguf", "model": folder / "apart" / "Tiny-Q8_0.gguf"}
    made["mtp"] = folder / "apart" / "mtp-Tiny-F16.gguf"
    for part, path in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        mixture_gguf(source, path, part=part, full_attention_interval=LAYERS, **written)
    return {**made, "source": source}


@pytest.mark.parametrize(("model", "drafter"), [("model", "mtp"), ("whole", "mtp"), ("source", "mtp:tree:{mtp}")])
def test_modules_in_a_file_of_their_own(model: str, drafter: str, said: Callable[..., str], tmp_path: Path) -> None:
    """Found beside the model, or named; with a target in a directory, too."""
    files = hybrid(tmp_path)
    prove = ("prove", *SHORT, "--drafter", drafter.format(**files))
    assert "0 differ" in said(*prove, "--model", str(files[model]), code=0)
    assert companion_modules(files["model"]) == files["mtp"] and companion_modules(files["whole"]) is None
    assert "mtp  (in the model's own files)" in said("drafters", str(files["whole"]), code=0)
    assert f"mtp  ({files['mtp']})" in said("drafters", str(files["model"]), code=0).replace("\n", "")
    assert "--drafter mtp is possible" in said("doctor", str(files["model"]), code=0)


@pytest.mark.parametrize("name", ["qwen3.5-experts", "qwen-next"])
def test_modules_in_a_gguf_file_and_apart_guess_as_those_in_a_directory(name: str, tmp_path: Path) -> None:
    import wager
    from wager.loading.drafters import open_drafters
    from wager.loading.opened import open_target

    files = hybrid(tmp_path, name)
    states, found = RNG.standard_normal((10, 48)).astype(np.float32), []
    for model in ("source", "whole", "model"):
        config = wager.EngineConfig.from_options(model=str(files[model]), drafter="mtp", dtype="bf16")
        [opened] = open_drafters(config, target := open_target(config))
        assert opened.head is not None
        head: Any = opened.head.load(decoder_on(target.weights, ReferenceKernels("float32"), max_rows=16), 8)
        packed = batch([chain(0, list(range(10)), [3])], [9])
        found.append(head.forward(packed, states, states[:0]).logits.copy())
    assert np.array_equal(*found[1:])
    assert_close(*found[:2], rtol=1e-3, atol=1e-3)


def test_the_file_beside_a_model_that_is_taken(tmp_path: Path) -> None:
    files = hybrid(tmp_path)
    model, modules = files["model"], files["mtp"]
    same = modules.with_name("mtp-Tiny-Q8_0.gguf")
    same.write_bytes(modules.read_bytes())
    assert companion_modules(model) == same, "of the model's own quantisation"
    other = modules.with_name("mtp-Other-Q8_0.gguf")
    for path in (same, modules):
        path.rename(other)
    assert companion_modules(model) == other, "the only one, beside the only model"
    model.with_name("Third-Q8_0.gguf").write_bytes(model.read_bytes())
    with pytest.raises(ModelError, match="has no MTP weights, and of the files beside it none has its name: mtp-Other"):
        companion_modules(model)
    assert drafters_of(model) == {}
    other.unlink()
    assert companion_modules(model) is None


def test_a_fingerprint_is_of_the_file_beside_the_model_too(tmp_path: Path) -> None:
    files = hybrid(tmp_path)
    found = drafter_fingerprint(DrafterSpec("mtp"), files["model"])
    assert found == drafter_fingerprint(DrafterSpec("mtp", str(files["mtp"]))) != ""
    assert drafter_fingerprint(DrafterSpec("mtp", "@after"), files["model"]) == found
    assert drafter_fingerprint(DrafterSpec("mtp"), files["whole"]) == drafter_fingerprint(DrafterSpec("mtp")) == ""
    with files["mtp"].open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"?")
    assert drafter_fingerprint(DrafterSpec("mtp"), files["model"]) != found


def test_heads_beside_a_model_are_named(said: Callable[..., str], tmp_path: Path) -> None:
    model = hybrid(tmp_path)["model"]
    spec = open_model(MODEL)[1].spec
    head = head_gguf(eagle_head(tmp_path / "head", spec), model.with_name("Tiny-EAGLE3-F16.gguf"), layers=2)
    assert drafters_of(model)[f"eagle3:{head}"] == str(head)


def test_a_damaged_file_beside_a_model_leaves_the_model_as_it_is(
    said: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = hybrid(tmp_path)["model"]
    model.with_name("mmproj-F16.gguf").write_bytes(b"GGUF")
    assert "--drafter mtp is possible" in said("doctor", str(model), code=0)
    assert "mmproj-F16.gguf is truncated" in caplog.text and "It is no drafter." in caplog.text


def test_widths_that_are_not_of_every_layer_are_refused(tmp_path: Path) -> None:
    file = open_gguf(hybrid(tmp_path)["model"])
    with pytest.raises(ModelError, match="a width for each layer"):
        read_gguf({**file.metadata, "qwen35moe.feed_forward_length": [1, 2]}, file.shapes)


@pytest.mark.slow
def test_files_that_do_not_belong_together_are_refused(said: Callable[..., str], tmp_path: Path) -> None:
    files, spec = hybrid(tmp_path), open_model(MODEL)[1].spec
    folder = eagle_head(tmp_path / "eagle", spec)
    eagle = head_gguf(folder, tmp_path / "eagle.gguf", layers=spec.num_layers)
    block = head_gguf(block_head(tmp_path / "block", spec), tmp_path / "block.gguf", layers=spec.num_layers)

    def run(model: Path | str, drafter: str = "none") -> str:
        short = ("--threads", "1", "--memory", "64MiB", "--max-tokens", "2")
        return " ".join(said("run", "hi", "--model", str(model), "--drafter", drafter, *short).split())

    assert "has only what predicts further tokens (MTP), not the model" in run(files["mtp"])
    assert "is the head of a drafter (general.architecture = 'eagle3'), not a model" in run(eagle)
    assert "--drafter dflash:PATH" in run(block)
    assert "is a model (general.architecture = 'qwen35moe'), not the head of a drafter" in run(
        files["whole"], f"eagle3:{files['model']}"
    )
    assert "has another tokenizer than the target" in run(MODEL, f"mtp:{files['mtp']}")
    assert "is a dflash head" in run(MODEL, f"eagle3:{block}")
    assert "is a 'eagle3' head" in run(MODEL, f"dflash:{eagle}")
    assert "is a eagle3 head" in run(files["model"], f"mtp:{eagle}")
    assert "is no Medusa head" in run(MODEL, f"medusa:{eagle}")
    bare = hybrid(tmp_path / "bare", tokens=False)["mtp"]
    assert "was trained for a target of hidden size 48" in run(MODEL, f"mtp:{bare}")
    assert "has no MTP weights" in run(files["model"], f"mtp:{files['model']}")
    lacking = head_gguf(folder, tmp_path / "lacking.gguf", layers=2, without=("fc.weight",))
    assert "lacks the tensor fc.weight" in run(MODEL, f"eagle3:{lacking}")
    untapped = head_gguf(folder, tmp_path / "untapped.gguf", layers=2, target_layers=None)
    assert "lacks eagle3.target_layers" in run(MODEL, f"eagle3:{untapped}")
    far = head_gguf(folder, tmp_path / "far.gguf", layers=2, target_layers=[0, 99])
    assert "after layer 99" in run(MODEL, f"eagle3:{far}")
    older = head_gguf(
        tmp_path / "block",
        tmp_path / "older.gguf",
        layers=2,
        tokenizer__ggml__mask_token_id=None,
        mask_token_id=3,
    )
    assert "from before DFlash was a part of llama.cpp" in run(MODEL, f"dflash:{older}")
    windowed = head_gguf(tmp_path / "block", tmp_path / "windowed.gguf", layers=2, attention__sliding_window=64)
    assert "layers of a sliding window" in run(MODEL, f"dflash:{windowed}")
