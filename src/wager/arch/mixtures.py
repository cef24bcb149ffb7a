"""Mixtures of experts and latent attention as Hugging Face configurations describe them.

What differs between architectures is a row of ExpertKeys; every value that would change the computation in a way the
decoder does not have is refused by name. Knows no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from wager.arch.config_keys import Keys
from wager.arch.spec import Experts, Latent
from wager.errors import ModelError

_MOST_EXPERTS = 1024


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Where one architecture's configuration says what, and what it leaves unsaid.

    `count` are the names the number of experts has gone by. `normalised` and `scaled` as in Family: always, never, or
    by a key. `sparse`: the first layers are dense by first_k_dense_replace, or some by mlp_only_layers and
    decoder_sparse_step. `methods` are the values of topk_method that mean one group, and those that mean n_group.
    """

    count: tuple[str, ...]
    width: str = "moe_intermediate_size"
    score: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    normalised: bool | str = True
    scale: str | None = None
    shared: str | None = None
    sparse: Literal["all", "after", "stepped"] = "all"
    methods: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    group_best: int = 1


def read_experts(keys: Keys, known: ExpertKeys, *, layers: int) -> Experts:
    """The experts of a configuration. ModelError names what is missing, contradictory or not supported."""
    count = keys.integer(next((name for name in known.count if keys.get(name) is not None), known.count[0]))
    chosen, width = keys.integer("num_experts_per_tok"), keys.integer(known.width)
    groups, top_groups = _groups(keys, known)
    keys.refuse("scoring_func", unless=(known.score,))
    keys.refuse("moe_layer_freq", unless=(1,))
    if known.normalised is False:
        keys.refuse("norm_topk_prob", unless=(False,))
    if count > _MOST_EXPERTS or not chosen <= count:
        raise ModelError(f"{chosen} of {count} experts cannot be right.", "The model's configuration is damaged.")
    if count % groups or top_groups > groups or chosen > count // groups * top_groups:
        raise ModelError(f"{chosen} of {count} experts cannot be chosen from {top_groups} of {groups} groups.")
    return Experts(
        count=count,
        chosen=chosen,
        width=width,
        layers=_sparse_layers(keys, known, layers=layers),
        shared=keys.count(known.shared) * width if known.shared else 0,
        score=known.score,
        corrected=known.corrected,
        normalised=keys.flag(known.normalised),
        scale=keys.number(known.scale, 1.0) if known.scale else 1.0,
        groups=groups,
        top_groups=top_groups,
        group_best=min(known.group_best, count // groups),
    )


def _groups(keys: Keys, known: ExpertKeys) -> tuple[int, int]:
    single, grouped = known.methods
    if not single and not grouped:
        return 1, 1
    keys.refuse("topk_method", unless=single + grouped)
    if keys.get("topk_method") in single:
        return 1, 1
    return keys.integer("n_group", 1), keys.integer("topk_group", 1)


def _sparse_layers(keys: Keys, known: ExpertKeys, *, layers: int) -> tuple[bool, ...]:
    if known.sparse == "after":
        return tuple(layer >= keys.count("first_k_dense_replace") for layer in range(layers))
    if known.sparse == "stepped":
        step, dense = keys.integer("decoder_sparse_step", 1), set(keys.get("mlp_only_layers") or ())
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    return (True,) * layers


def read_latent(keys: Keys, *, heads: int, interleaved: bool) -> Latent:
    """Multi-head latent attention. Where YaRN stretches the context, scores grow by the square of its magnitude for
    `mscale_all_dim` (DeepSeek-V2, section 3.1.4). ModelError names what is missing or not supported."""
    keys.refuse("num_key_value_heads", unless=(heads,))
    keys.refuse("attention_bias", unless=(False,))
    rope, nope = keys.integer("qk_rope_head_dim"), keys.integer("qk_nope_head_dim")
    if rope % 2:
        raise ModelError(f"qk_rope_head_dim = {rope} is odd; rotation needs pairs.")
    return Latent(
        rank=keys.integer("kv_lora_rank"),
        rope=rope,
        nope=nope,
        value=keys.integer("v_head_dim"),
        scale=(nope + rope) ** -0.5 * _magnitude(keys) ** 2,
        q_rank=keys.count("q_lora_rank"),
        interleaved=interleaved,
    )


def _magnitude(keys: Keys) -> float:
    scaling = Keys(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = scaling.number("factor")
    return 1.0 if factor <= 1 else 0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1.0
