"""What the dashboard shows: the server as it is, and counters since its start, of which the page makes rates."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from wager import __version__
from wager.async_llm import AsyncLLM
from wager.serve.formats import encoded
from wager.serve.limits import Admission
from wager.serve.metrics import Metrics, StepTotals
from wager.types import StepRecord

_FILES: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("dashboard.js", "page.js", "history.js", "charts.js", "playground.js"), "text/javascript; charset=utf-8"
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


@dataclass(eq=False)
class LiveView:
    """Serves the page and its numbers. `step` is called in the event loop after every step."""

    llm: AsyncLLM
    admission: Admission
    totals: StepTotals
    metrics: Metrics
    model: str
    _started: float = field(default_factory=time.monotonic)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))  # seconds of the latest steps
    _answer: bytes = b""
    _answered: float = -math.inf

    def step(self, record: StepRecord) -> None:
        self._recent.append(sum(record.seconds.values()))

    async def read(self, http: Request) -> Response:
        """The numbers as JSON."""
        del http
        now = time.monotonic()
        if now - self._answered >= _FRESH_S:
            self._answer = encoded(await self._numbers())
            self._answered = now
        return Response(self._answer, media_type="application/json")

    async def _numbers(self) -> dict[str, Any]:
        """The policy is asked in the engine's thread, between two steps."""
        policy = self.llm.engine.policy
        figures, collapsed, words = await self.llm.between_steps(
            lambda: (policy.figures(), dict(policy.collapsed), policy.explain())
        )
        scheduler = self.llm.engine.scheduler
        pool = scheduler.block_pool
        recent = sorted(self._recent)
        return {
            "model": self.model,
            "version": __version__,
            "uptime_s": time.monotonic() - self._started,
            "drafters": self.llm.engine.drafter_name,
            "running": scheduler.num_running,
            "max_running": scheduler.max_sequences,
            "waiting": scheduler.num_waiting,
            "open": self.admission.open,
            "cache_usage": 1 - pool.num_free_blocks / pool.num_blocks,
            "steps": self.totals.steps,
            "tokens": self.totals.tokens,
            "rows": self.totals.rows,
            "stage_seconds": self.totals.stage_seconds,
            "step_p50_s": recent[len(recent) // 2] if recent else 0.0,
            "step_p99_s": recent[len(recent) * 99 // 100] if recent else 0.0,
            "drafts": {
                name: {
                    "drafts": counts.drafts,
                    "verified": counts.verified_tokens,
                    "accepted": counts.accepted_tokens,
                    "verified_by_length": counts.verified,
                    "verified_by_depth": counts.levels,
                    "accepted_by_length": counts.accepted,
                }
                for name, counts in self.metrics.drafts.drafters.items()
            },
            "planned_depths": self.metrics.drafts.planned,
            "requests_by_tau": self.metrics.requests_by_tau,
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
