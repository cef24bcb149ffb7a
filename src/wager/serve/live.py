"""What the dashboard shows: the server as it is, counters since its start, and its last minutes, which are kept here: a
page that is opened has them at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from wager import __version__
from wager.async_llm import AsyncLLM
from wager.engine.rounds import DrafterCounts
from wager.errors import WagerError
from wager.serve.formats import encoded
from wager.serve.limits import Admission
from wager.serve.metrics import Metrics, StepTotals
from wager.types import StepRecord

_FILES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("dashboard.js", "page.js", "history.js", "charts.js", "playground.js", "markdown.js"),
        "text/javascript; charset=utf-8",
    ),
}

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",  # no text becomes markup, whatever the scripts do
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_RECENT_STEPS = 512

_FRESH_S = 0.5
"""Seconds for which an answer is given again: however many pages are open, the engine is asked twice a second."""

_SPAN_S = 180
"""Seconds of which samples are kept."""

_PERIOD_S = 1.0

Counts = dict[str, Any]
"""Counters since the start, by name."""


@dataclass(eq=False)
class LiveView:
    """Serves the page and its numbers. `step` is called in the event loop after every step; `watch` runs in it."""

    llm: AsyncLLM
    admission: Admission
    totals: StepTotals
    metrics: Metrics
    model: str
    _started: float = field(default_factory=time.monotonic)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))  # seconds of the latest steps
    _samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_SPAN_S))
    _counts: deque[Counts] = field(default_factory=lambda: deque(maxlen=_SPAN_S + 1))  # at the ends of the samples
    _answer: dict[str, Any] = field(default_factory=dict)
    _answered: float = -math.inf

    def step(self, record: StepRecord) -> None:
        self._recent.append(sum(record.seconds.values()))

    async def watch(self) -> None:
        """Keep a sample every second, until it is cancelled or the engine has failed."""
        self._counts.append(self._counted())
        with suppress(WagerError):
            while True:
                await asyncio.sleep(_PERIOD_S)
                await self._sample()

    async def _sample(self) -> None:
        """What happened since the last sample; the policy is asked only if there were steps."""
        before, now = self._counts[-1], self._counted()
        steps, seconds = now["steps"] - before["steps"], now["uptime_s"] - before["uptime_s"]
        figures = await self.llm.between_steps(self.llm.engine.policy.figures) if steps else None
        stages = {
            name: 1e3 * (spent - before["stage_seconds"].get(name, 0.0)) / steps
            for name, spent in (now["stage_seconds"].items() if steps else ())
        }
        state = self._state()
        self._samples.append(
            {
                "at": now["uptime_s"],
                "speed": (now["tokens"] - before["tokens"]) / seconds,
                "running": state["running"],
                "waiting": state["waiting"],
                "cache": 100 * state["cache_usage"],
                "stages": stages or None,
                "predicted": figures and figures.predicted_speedup,
                "observed": figures and figures.observed_speedup,
                "cost": figures and figures.row_cost,
            }
        )
        self._counts.append(now)

    async def read(self, http: Request) -> Response:
        """The numbers as JSON, with the samples after `since`, in seconds since the start; all of them where that is
        later than now: the page remembers another server."""
        now = time.monotonic()
        if now - self._answered >= _FRESH_S:
            self._answer = await self._numbers()
            self._answered = now
        try:
            since = float(http.query_params.get("since", 0))
        except ValueError:
            since = 0.0
        since = since if since <= now - self._started else 0.0
        samples = [sample for sample in self._samples if sample["at"] > since]
        return Response(encoded({**self._answer, "samples": samples}), media_type="application/json")

    def _state(self) -> dict[str, Any]:
        scheduler = self.llm.engine.scheduler
        pool = scheduler.block_pool
        return {
            "running": scheduler.num_running,
            "max_running": scheduler.max_sequences,
            "waiting": scheduler.num_waiting,
            "open": self.admission.open,
            "cache_usage": 1 - pool.num_free_blocks / pool.num_blocks,
        }

    def _counted(self) -> Counts:
        drafts = self.metrics.drafts
        unverified = [name for name in list(drafts.drafted) if name not in drafts.drafters]
        return {
            "uptime_s": time.monotonic() - self._started,
            "steps": self.totals.steps,
            "tokens": self.totals.tokens,
            "rounds": self.totals.rounds,
            "rows": self.totals.rows,
            "stage_seconds": dict(self.totals.stage_seconds),
            "drafts": {
                name: {
                    "drafts": counts.drafts,
                    "drafted": drafts.drafted.get(name, 0),
                    "verified": counts.verified_tokens,
                    "accepted": counts.accepted_tokens,
                    "verified_by_length": list(counts.verified),
                    "verified_by_depth": list(counts.levels),
                    "accepted_by_length": list(counts.accepted),
                }
                for name, counts in [*drafts.drafters.items(), *((name, DrafterCounts()) for name in unverified)]
            },
            "planned_depths": list(drafts.planned),
            "requests_by_tau": list(self.metrics.requests_by_tau),
        }

    async def _numbers(self) -> dict[str, Any]:
        """The policy is asked in the engine's thread, between two steps. `base` are the counters three minutes ago."""
        policy = self.llm.engine.policy
        figures, collapsed, words = await self.llm.between_steps(
            lambda: (policy.figures(), dict(policy.collapsed), policy.explain())
        )
        recent = sorted(self._recent)
        return {
            "model": self.model,
            "version": __version__,
            "drafters": self.llm.engine.drafter_name,
            **self._state(),
            **self._counted(),
            "base": self._counts[0] if self._counts else None,
            "step_p50_s": recent[len(recent) // 2] if recent else 0.0,
            "step_p99_s": recent[len(recent) * 99 // 100] if recent else 0.0,
            "figures": None if figures is None else asdict(figures),
            "collapsed": collapsed,
            "policy": words,
        }

    @staticmethod
    async def page(http: Request) -> Response:
        """The page, and the script and style that it names."""
        name = http.url.path.strip("/") or "index.html"
        content = resources.files("wager.serve").joinpath("dashboard", name).read_bytes()
        return Response(content, headers={**_HEADERS, "content-type": _FILES[name]})


PAGE_PATHS = ("/", *(f"/{name}" for name in _FILES if name != "index.html"))
"""Paths of the page and its files."""
