"""Mixtures of experts in the metadata of GGUF files: the feed-forward of every layer and the router's gating; and the
factor of the scores of DeepSeek's latent attention."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from wager.arch.config_keys import ConfigKeys
from wager.arch.families import EngineSupport, GgufLayout
from wager.arch.hf_config import MOST_EXPERTS_OF_ALL_LAYERS, check_gating
from wager.arch.layers import Absent, Dense, Experts, Gating, Mla
from wager.arch.rope import Rope
from wager.errors import ModelError

_GATINGS: Mapping[int, Literal["softmax", "sigmoid"]] = {1: "softmax", 2: "sigmoid"}
"""llama.cpp's codes of expert_gating_func."""

_CORRECTION = re.compile(r"blk\.\d+\.exp_probs_b\.bias")
SPLIT_LATENT = "blk.0.attn_k_b.weight"
"""A tensor of files whose projections from the latent are two matrices; older ones have one."""


def read_feed_forwards(
    keys: ConfigKeys, engine: EngineSupport, layout: GgufLayout, layers: int, tensors: Collection[str]
) -> list[Dense | Experts | Absent]:
    """The feed-forward of every layer of a file with experts; `tensors` are the names of the file's. ModelError names a
    value that is not supported."""
    count = keys.integer("expert_count")
    if not layout.experts:
        raise ModelError(
            f"{keys.prefix}expert_count = {count} in {keys.where} is not supported: this architecture has no experts.",
            "The file's metadata names the wrong architecture.",
        )
    first = min(keys.count("leading_dense_block_count"), layers)
    if count * (layers - first) > MOST_EXPERTS_OF_ALL_LAYERS:
        raise ModelError(
            f"{count} experts in each of {layers} layers of {keys.where} cannot be right.", "It is damaged."
        )
    experts = _experts(keys, engine, layout, count, tensors)
    if isinstance(keys.get("feed_forward_length"), list):  # in layers of their own
        widths = keys.integers("feed_forward_length") or ()
        if len(widths) < layers:
            raise keys.wrong("feed_forward_length", "a width for each layer")
        return [experts if width else Absent() for width in widths[:layers]]
    dense: list[Dense | Experts | Absent] = [Dense(keys.integer("feed_forward_length"))] * first if first else []
    return dense + [experts] * (layers - first)


def _experts(
    keys: ConfigKeys, engine: EngineSupport, layout: GgufLayout, count: int, tensors: Collection[str]
) -> Experts:
    stated = keys.get("expert_feed_forward_length") is not None
    width = keys.integer("expert_feed_forward_length" if stated else "feed_forward_length")
    active, shared_width = keys.integer("expert_used_count"), keys.count("expert_shared_feed_forward_length")
    shared = keys.count("expert_shared_count", default=1 if shared_width else 0)
    gated = engine.activation != "relu2"
    if not gated:
        shared = min(shared, 1)  # of the width of all
    if engine.apart:
        shared, shared_width = 1, keys.integer("feed_forward_length")
    if active > count:
        raise ModelError(f"{keys.where} has {active} experts active out of {count}.", "The file is damaged.")
    corrected = any(_CORRECTION.fullmatch(name) for name in tensors)
    groups = keys.integer("expert_group_count", default=1) if keys.get("expert_group_count") else 1
    score = _score(keys, corrected=corrected)
    gating = Gating(
        score=score,
        correction_bias=corrected,
        normalised=keys.flag("expert_weights_norm", default=layout.normalised),
        scale=keys.number("expert_weights_scale") if keys.get("expert_weights_scale") else 1.0,
        groups=groups,
        top_groups=keys.integer("expert_group_used_count", default=1) if groups > 1 else 1,
        expert_scales=engine.gating is not None and engine.gating.expert_scales,
    )
    experts = Experts(
        count,
        active,
        shared,
        width,
        shared_width or None,
        biased=engine.expert_bias,
        shared_gate=engine.shared_gate and shared > 0,
        apart=engine.apart,
        gated=gated,
        latent=keys.count("moe_latent_size"),
    )
    return check_gating(experts, gating, group_best=2 if score == "sigmoid" else 1, where=keys.where)


def _score(keys: ConfigKeys, *, corrected: bool) -> Literal["softmax", "sigmoid"]:
    """Files from before the key existed: only routers with sigmoids have a correction."""
    code = keys.count("expert_gating_func")
    if code == 0:
        return "sigmoid" if corrected else "softmax"
    if code not in _GATINGS:
        raise ModelError(
            f"{keys.prefix}expert_gating_func = {code} in {keys.where} is not supported.",
            f"Supported are: {', '.join(f'{known} ({name})' for known, name in _GATINGS.items())}.",
        )
    return _GATINGS[code]


def latent_scores(keys: ConfigKeys, attention: Mla, rope: Rope) -> tuple[Rope, float]:
    """The rotation, and the factor of latent attention's scores: under YaRN the rotation has no magnitude, and the
    weight is yarn_log_multiplier."""
    if keys.text("rope.scaling.type") != "yarn":
        return rope, attention.score_scale()
    factor, weight = keys.number("rope.scaling.factor"), keys.get("rope.scaling.yarn_log_multiplier")
    weight = keys.number("rope.scaling.yarn_log_multiplier") if weight else 0.0
    return replace(rope, magnitude=1.0), attention.score_scale(factor, weight)
