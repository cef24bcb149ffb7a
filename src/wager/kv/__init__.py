"""Where keys and values live: page accounting. The tensors themselves belong to the kernels' cache."""

from wager.kv.pages import PageTable

__all__ = ["PageTable"]
