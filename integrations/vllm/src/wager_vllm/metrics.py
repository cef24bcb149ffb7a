"""What wager decided and what came of it, under vLLM's own /metrics.

Decisions are made in the worker (a proposer) or the engine's core (the scheduler), and /metrics is answered by the API
server. So each writes its figures to a file of a folder that the first process makes, and the server reads them when it
is asked. Engines on other machines have no such folder: their figures are theirs alone.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wager.errors import MALFORMED
from wager.trace import Clock
from wager_vllm.compat import Deployment
from wager_vllm.decisions import Decisions
from wager_vllm.options import PREFIX
from wager_vllm.prices import StepPrices

FOLDER = f"{PREFIX}METRICS_FOLDER"
"""The environment variable that tells processes where the figures are."""

_INTERVAL = 1.0  # seconds between two writings

_GAUGES = {
    "row_cost": "Tokens that one more row of a step must bring.",
    "predicted_speedup": "Tokens a second over plain decoding's, as the last step was planned.",
    "observed_speedup": "The same, as the latest steps were.",
    "plain_step_s": "Seconds of a step without draft tokens, as estimated.",
}
_NAMES = {"plain_step_s": "plain_step_seconds", "row_cost": "row_cost_tokens"}


def make_folder() -> None:
    """A folder for the figures of this vLLM, unless a process before this one made it."""
    if not os.environ.get(FOLDER):
        folder, made_by = tempfile.mkdtemp(prefix="wager-vllm-"), os.getpid()
        os.environ[FOLDER] = folder
        atexit.register(_remove, folder, made_by=made_by)


def _remove(folder: str, *, made_by: int) -> None:
    """At the end of the process that made it, not of those forked from it."""
    if os.getpid() == made_by:
        shutil.rmtree(folder, ignore_errors=True)


class FiguresFile:
    """The figures of this process, written now and then."""

    def __init__(self, deployment: Deployment, *, clock: Clock) -> None:
        folder = os.environ.get(FOLDER)
        self._path = Path(folder, f"{deployment.engine}-{os.getpid()}.json") if folder else None
        self._clock = clock
        self._next = clock()
        self._values: dict[str, Any] = {"model_name": deployment.served_as, "engine": str(deployment.engine)}

    def update(self, decisions: Decisions | None, prices: StepPrices, *, failed: Collection[str]) -> None:
        """After a step. `prices` may be measured still, without any decisions; `failed` are drafters that pause."""
        if self._path is None or self._clock() < self._next:
            return
        self._next = self._clock() + _INTERVAL
        self._values["measuring"] = prices.surface is None
        self._values["failed"] = sorted(failed)
        if decisions is not None:
            counts, figures = decisions.counts, decisions.figures()
            self._values |= {
                name: [[*key, value] for key, value in counted.items()]
                for name, counted in (
                    ("decided", counts.decided),
                    ("reaching", counts.reaching),
                    ("accepted", counts.accepted),
                )
            }
            self._values |= {"off": dict(counts.off), "steps": counts.steps}
            gauges = {name: getattr(figures, name, None) for name in _GAUGES}
            known = {name: value for name, value in gauges.items() if value is not None}
            self._values["gauges"] = self._values.get("gauges", {}) | known
        self._write()

    def stopped(self, reason: str) -> None:
        """The proposer failed for good."""
        self._values["stopped"] = reason
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with suppress(OSError):  # of one writer, and not to outlive this vLLM: nothing waits for the disk
            unfinished = self._path.with_suffix(".new")
            unfinished.write_text(json.dumps(self._values))
            unfinished.replace(self._path)


class FiguresCollector(Collector):
    """Reads the files of all processes."""

    def describe(self) -> list[Metric]:
        """Names are known when there are figures."""
        return []

    def collect(self) -> Iterator[Metric]:
        found = list(_read_figures())
        labels = ["model_name", "engine"]

        def counter(name: str, text: str, key: str, *more: str) -> CounterMetricFamily:
            family = CounterMetricFamily(name, text, labels=[*labels, *more])
            for values in found:
                for *keys, value in values.get(key, ()):
                    family.add_metric([values["model_name"], values["engine"], *map(str, keys)], value)
            return family

        yield counter(
            "wager:draft_depth_decided", "Drafts planned, by drafter and depth.", "decided", "drafter", "depth"
        )
        yield counter(
            "wager:draft_tokens_verified", "Draft tokens verified, by position.", "reaching", "drafter", "position"
        )
        yield counter(
            "wager:draft_tokens_accepted", "Draft tokens accepted, by position.", "accepted", "drafter", "position"
        )
        # Under vLLM's prefix, beside its accepted tokens by position: without it their shares say nothing where drafts
        # differ in depth.
        reaching = CounterMetricFamily(
            "vllm:spec_decode_num_draft_tokens_per_pos", "Draft tokens per position.", labels=[*labels, "position"]
        )
        off = CounterMetricFamily(
            "wager:requests_without_draft", "Requests that decoded plainly in a step.", labels=[*labels, "reason"]
        )
        steps = CounterMetricFamily("wager:planned_steps", "Steps that the policy planned.", labels=labels)
        stopped = GaugeMetricFamily(
            "wager:off", "1 if nothing is drafted at all, or not by a drafter.", labels=[*labels, "reason"]
        )
        gauges = {
            name: GaugeMetricFamily(f"wager:{_NAMES.get(name, name)}", text, labels=labels)
            for name, text in _GAUGES.items()
        }
        for values in found:
            own = [values["model_name"], values["engine"]]
            by_position: Counter[int] = Counter()
            for _, position, count in values.get("reaching", ()):
                by_position[position] += count
            for position, count in sorted(by_position.items()):
                reaching.add_metric([*own, str(position)], count)
            for reason, count in values.get("off", {}).items():
                off.add_metric([*own, reason], count)
            steps.add_metric(own, values.get("steps", 0))
            for reason in _reasons(values):
                stopped.add_metric([*own, reason], 1)
            for name, value in values.get("gauges", {}).items():
                gauges[name].add_metric(own, value)
        yield from (reaching, off, steps, stopped, *gauges.values())


def _reasons(values: Mapping[str, Any]) -> list[str]:
    """Why nothing is drafted now."""
    found = [f"drafter {name} failed" for name in values.get("failed", ())]
    if values.get("measuring"):
        found.append("prices are measured")
    if stopped := values.get("stopped"):
        found.append(stopped)
    return found


def _read_figures() -> Iterator[dict[str, Any]]:
    folder = os.environ.get(FOLDER)
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        with suppress(OSError, *MALFORMED):
            yield json.loads(path.read_text(encoding="utf-8"))
