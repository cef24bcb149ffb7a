"""Sizes that every configuration format contains, checked against plausible limits."""

from __future__ import annotations

from wager.arch.attention import Gqa
from wager.arch.config_keys import ConfigKeys
from wager.errors import ModelError

_MOST_LAYERS, _MOST_HEAD_DIM = 10_000, 8192
MOST_NORM_EPS = 1.0
"""A configuration with larger values is damaged; accepting it would exhaust the memory."""


def read_num_layers(keys: ConfigKeys, name: str) -> int:
    """The number of layers, from the key `name`."""
    layers = keys.integer(name)
    if layers > _MOST_LAYERS:
        raise ModelError(
            f"{name} = {layers} cannot be right: no model has that number of layers, as {keys.where} has.",
            "The configuration is damaged.",
        )
    return layers


def read_head_dim(keys: ConfigKeys, name: str, *, hidden: str, heads: int) -> int:
    """The size of a head, from the key `name`; where it is absent, the size under `hidden` by the number of heads,
    rounded down as transformers does."""
    if keys.get(name) is not None:
        return keys.integer(name)
    size = keys.integer(hidden)
    if size < heads:
        raise ModelError(f"{keys.prefix}{hidden} = {size} in {keys.where} is too small for {heads} heads.")
    return size // heads


def check_head_dim(keys: ConfigKeys, name: str, size: int) -> None:
    """ModelError unless the size of a head is even and plausible."""
    if size > _MOST_HEAD_DIM:
        raise ModelError(f"A {name} of {size} in {keys.where} cannot be right.", "The configuration is damaged.")
    if size % 2:
        raise ModelError(f"{name} = {size} in {keys.where} is odd; rotation needs pairs.")


def check_grouped_query(keys: ConfigKeys, attention: Gqa) -> Gqa:
    """The attention that was read from the keys, or ModelError unless query heads divide evenly among key-value heads
    and head_dim is even and plausible."""
    if attention.heads % attention.kv_heads:
        raise ModelError(
            f"{attention.heads} query heads cannot share {attention.kv_heads} key-value heads evenly, in {keys.where}."
        )
    check_head_dim(keys, "head_dim", attention.head_dim)
    return attention
