"""Memory for Prometheus: what was planned, what of the cache was ever written, and what the process has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from wager.loading.load import LoadedEngine


class MemoryGauges:
    """A collector. `read` is called in the engine's thread, between two steps."""

    def __init__(self, engine: LoadedEngine, *, model: str) -> None:
        self._engine, self._model = engine, model
        self._drafters: Mapping[str, int] = {}

    def read(self) -> None:
        """Weigh what the drafters keep that have no model: texts that ended and are looked up."""
        drafters = self._engine.proposer.drafters.items()
        self._drafters = {name: drafter.nbytes for name, drafter in drafters if hasattr(drafter, "nbytes")}

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        plan, cache = self._engine.memory_plan, self._engine.target.decoder.cache
        planned = {"weights": plan.weights, "workspace": plan.workspace, "drafter": plan.drafter, "cache": plan.cache}
        resident = getattr(cache, "resident_bytes", None)  # of native caches
        parts = {} if resident is None else {"reserved": plan.cache - plan.draft_cache, "resident": resident}
        for name, text, label, values in (
            ("memory_planned_bytes", "Bytes of the memory plan; the cache is reserved.", "use", planned),
            ("kv_cache_bytes", "The target's cache: reserved, and resident once written.", "kind", parts),
            ("drafter_texts_bytes", "Bytes of the texts that a drafter looks up.", "drafter", self._drafters),
            ("process_resident_bytes", "Bytes of the process in memory.", "kind", resident_bytes()),
        ):
            family = GaugeMetricFamily(f"wager:{name}", text, labels=("model_name", label))
            for key, value in values.items():
                family.add_metric((self._model, key), value)
            yield family


def resident_bytes(status: Path = Path("/proc/self/status")) -> Mapping[str, int]:
    """Bytes in memory: `anonymous`, which are the process's own, and `file`, of mapped files, which the system can take
    back. Nothing where it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        anonymous, file, shared = (int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem"))
    except (OSError, KeyError, ValueError):
        return {}
    return {"anonymous": anonymous, "file": file + shared}
