"""Opens a model by path or name, and tells one target or tokenizer from another: what trained drafters and measured
figures are bound to.

Norm weights are stored as floats in every quantisation of a model, so a drafter trained on one fits the others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from wager.arch import ModelSpec
from wager.arch.config_keys import ConfigKeys
from wager.inputs import expand_path, read_text
from wager.models import hub
from wager.models.tokenizer import Tokenizer, num_tokens
from wager.models.weights import Weights, open_weights, tensor_shapes


def open_model(model: str, *, chat_template: str | Path | None = None) -> tuple[Path, Weights, Tokenizer]:
    """A model by path or name (fetched if necessary), its tensors checked and not yet read; `random:` models are
    generated. `chat_template`: a file with one in place of its own. WagerError names what is not known, missing or
    damaged."""
    if hub.is_random(model):
        from wager.models import random_models

        path, (weights, tokenizer) = Path(model), random_models.make(model)
    else:
        path = hub.resolve(model)
        weights, tokenizer = open_weights(path), Tokenizer.load(path)
    if chat_template is not None:
        hint = "Give a Jinja template, as in a model's chat_template.jinja."
        text = read_text(expand_path(str(chat_template)), "chat template", hint)
        tokenizer = tokenizer.with_chat_template(text)
    return path, weights, tokenizer


def target_fingerprint(weights: Weights) -> str:
    """SHA-256, in hex, of the shapes of all tensors and of the norm weights as float32."""
    found = hashlib.sha256()
    for name, shape in sorted(tensor_shapes(weights.spec).items()):
        found.update(f"{name} {list(shape)}\n".encode())
        if name.split(".")[-2].endswith("norm"):
            found.update(np.ascontiguousarray(weights.read(name), "<f4").tobytes())
    return found.hexdigest()


def tokenizer_fingerprint(tokenizer: Tokenizer, *, with_padding: bool = False) -> str:
    """SHA-256, in hex, of every token, the ids that end a text and the chat template; `with_padding` also of the names
    that a GGUF file gives to ids without a token, as drafters were noted before."""
    found = hashlib.sha256()
    for token_id in range(tokenizer.vocab_size if with_padding else num_tokens(tokenizer)):
        found.update(tokenizer.token(token_id).encode("utf-8", "surrogatepass") + b"\0")
    found.update(repr((sorted(tokenizer.eos_ids), tokenizer.chat_template)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def model_sizes(spec: ModelSpec) -> str:
    """The sizes of a model that its files and published figures give alike."""
    return f"{spec.num_layers} layers of {spec.hidden}"


def fingerprints(weights: Weights, tokenizer: Tokenizer) -> dict[str, str]:
    """What a measured figure notes of its model."""
    return {
        "target_sizes": model_sizes(weights.spec),
        "target_fingerprint": target_fingerprint(weights),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
    }


def trained_for_another(noted: ConfigKeys, weights: Weights, tokenizer: Tokenizer, name: str) -> str | None:
    """How the target that a drafter was trained for or a figure measured with, as it notes, differs from the one called
    `name`: the end of a sentence; None if it does not, or nothing is noted."""
    if (found := noted.text("target_fingerprint")) and found != target_fingerprint(weights):
        target = noted.text("target") or noted.text("model") or "another model"
        return f"for {target}, whose weights are not those of {name}"
    prints = (tokenizer_fingerprint(tokenizer, with_padding=each) for each in (False, True))
    if (found := noted.text("tokenizer_fingerprint")) and found not in prints:
        return f"with another tokenizer or chat template than that of {name}"
    return None
