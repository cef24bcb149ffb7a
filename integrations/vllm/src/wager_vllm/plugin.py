"""What vLLM runs in each of its processes before anything is built (entry point vllm.general_plugins)."""

from __future__ import annotations

from functools import cache

from wager_vllm import compat
from wager_vllm.metrics import FiguresCollector, make_folder


@cache
def register() -> None:
    """Put the hooks in, and the metrics. On a vLLM that is unknown it says so and does nothing: who uses the plugin is
    refused when vLLM makes its proposer."""
    try:
        if not compat.usable():
            return
    except compat.IncompatibleError as error:
        compat.log.warning("%s", str(error).replace("\n", " "))
        return
    make_folder()
    compat.install_hooks()
    compat.add_collector(FiguresCollector())
