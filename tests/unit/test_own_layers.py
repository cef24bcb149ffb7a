"""A draft model of the target's own layers: the same logits as a model that has only these."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_drafter_combinations import TEXTS, requests
from tiny_models import TOKENS, oracle, oracle_logits, save

import wager
from oracle.kernels import ReferenceKernels
from packing import batch, chain
from wager.drafter_spec import parse_layers
from wager.errors import UsageError
from wager.loading.load import load
from wager.models.transformer import Decoder
from wager.models.weights import open_weights


def test_layers_as_they_are_written() -> None:
    assert parse_layers("0-2", 5) == (0, 1, 2)
    assert parse_layers("0-1.3.4", 9) == (0, 1, 3, 4)
    for text, message in (
        ("1-", "cannot be read"),
        ("0-3.3", "ascending"),
        ("0-5", "Layer 5 of '0-5' does not exist"),
        ("0-4", "all that the model has"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_layers(text, 5)


@pytest.mark.parametrize("layers", [(0, 2), (1, 2, 3)])
def test_its_logits_are_those_of_a_model_that_has_no_other_layers(layers: tuple[int, ...], tmp_path: Path) -> None:
    whole = oracle("LlamaForCausalLM", num_hidden_layers=4)
    weights = open_weights(save(whole, tmp_path))
    sizes = {"num_blocks": 8, "max_rows": len(TOKENS), "max_sequences": 1, "max_blocks": 8}
    decoder = Decoder(weights, ReferenceKernels("float32"), **sizes, layers=layers)
    packed = batch([chain(0, TOKENS, list(range(8))[::-1])], range(len(TOKENS)))
    kept = oracle("LlamaForCausalLM", num_hidden_layers=len(layers))
    states = whole.state_dict()
    for name in kept.state_dict():
        number = name.split(".")[2] if name.startswith("model.layers.") else ""
        source = name.replace(f".{number}.", f".{layers[int(number)]}.", 1) if number else name
        kept.state_dict()[name].copy_(states[source])
    assert np.allclose(decoder.forward(packed).logits, oracle_logits(kept, TOKENS), atol=2e-3)


def test_layers_that_read_keys_and_values_of_others(tmp_path: Path) -> None:
    """The last three layers of this model have none of their own: with a window, without and with one again."""
    options = {"model": "random:gemma4:edge", "max_rows": 32, "max_sequences": 4, "cache_tokens": 96}
    plain, found = load(wager.EngineConfig.from_options(**options, drafter="none")), []
    for drafter in ("none", "layers:0.4", "layers:0-1.3-4"):
        engine = load(wager.EngineConfig.from_options(**options, drafter=drafter, depth=3))
        found.append([each.token_ids for each in engine.generate(requests(plain, TEXTS), concurrency=3)])
    assert found[1] == found[0] == found[2]
    with pytest.raises(UsageError, match=r"Layer 3 of .* reads keys and values of a layer before it"):
        load(wager.EngineConfig.from_options(**options, drafter="layers:0.3"))
