"""Experts that a running model chose: as transformers chooses, in one pass and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TOKENS, oracle, save

from oracle.kernels import ReferenceKernels
from packing import pool_of
from wager.models.transformer import Decoder
from wager.models.weights import open_weights
from wager.types import Span
from wager.verify.pack import pack

QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 16}


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Qwen3MoeForCausalLM", {**QWEN, "decoder_sparse_step": 2}),
        ("MixtralForCausalLM", {"num_local_experts": 5}),
    ],
)
def test_the_choices_are_the_routers_top_experts(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    """The experts of the highest router logits that transformers computes, at each position and layer."""
    model = oracle(architecture, **config)
    weights = open_weights(save(model, tmp_path))
    with torch.no_grad():
        logits = model(torch.tensor([list(TOKENS)]), output_router_logits=True).router_logits
    experts = weights.spec.experts
    assert experts is not None
    expected = [layer.topk(experts.active).indices.sort().values.numpy() for layer in logits]
    sizes = {"num_blocks": 16, "max_rows": 64, "max_sequences": 1, "max_blocks": 16}
    decoder = Decoder(weights, ReferenceKernels("float32"), **sizes, keep_expert_choices=True)
    for length in (len(TOKENS), 1):
        for start in range(0, len(TOKENS), length):
            span = Span("text", start, tuple(TOKENS[start : start + length]), needs_logits=True)
            decoder.forward(pack([span], {}, pool_of({"text": range(16)})))
            for chosen, wanted in zip(decoder.expert_choices, expected, strict=True):
                np.testing.assert_array_equal(chosen[:length], wanted[start : start + length])
    plain = Decoder(weights, ReferenceKernels("float32"), **sizes)
    assert plain.expert_choices == []
