"""Where keys and values live: page accounting. The tensors themselves belong to the kernels' cache."""

from wager.kv.blocks import BlockPool

__all__ = ["BlockPool"]
