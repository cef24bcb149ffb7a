"""The results of `wager replay` as a table, lines and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from wager.planner.plan import SPARE_SHARE
from wager.planner.report import token_rate
from wager.simulation.comparison import ReplayPoint
from wager.simulation.options import ReplayQuery

_COLUMNS = [
    "workload",
    "policy",
    "tok/s",
    "per user",
    "per device",
    "τ",
    "drafted",
    "admitted",
    "vs fixed",
    "frontier",
]


def head(query: ReplayQuery) -> list[str]:
    """Where step times and the prices of drafters come from."""
    lines = [f"step times  {query.step_times}"]
    if query.believed:
        lines.append(f"believed    by policies until they learn: {query.believed}")
    return lines + [f"{'' if index else 'drafters':10}  {price.line()}" for index, price in enumerate(query.prices)]


def table(points: Sequence[ReplayPoint], chosen: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: for each workload the best fixed depth, then the chosen policies."""
    shown = [point for point in points if point.policy == point.best_fixed or point.policy in chosen]
    slo = any(point.within_slo is not None for point in points)
    columns = [*_COLUMNS, "in SLO"] if slo else _COLUMNS
    return columns, [_row(point) for point in shown]


def _row(point: ReplayPoint) -> list[str]:
    best = point.policy == point.best_fixed and point.policy != "none"
    name = f"{point.policy} (best)" if best else point.policy
    fits = " !" if point.memory is not None and point.memory.fits is False else ""
    slo = [] if point.within_slo is None else [f"{point.within_slo:.0%}"]
    return [
        point.workload + fits,
        name,
        *map(token_rate, (point.throughput, point.per_user, point.per_device)),
        f"{point.tau:.2f}",
        f"{point.drafted:.2f}",
        f"{point.admitted:.2f}",
        signed_percent(-point.regret),
        "•" if point.frontier else "",
        *slo,
    ]


def signed_percent(share: float) -> str:
    """With one decimal and a sign, except for 0."""
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f} %" if rounded else "0.0 %"


def notes(query: ReplayQuery, points: Sequence[ReplayPoint]) -> Iterator[str]:
    """What does not fit, which SLO is not met, and what the columns mean."""
    if any(point.memory is not None and point.memory.fits is False for point in points):
        worst = max((point.memory for point in points if point.memory), key=lambda memory: memory.total)
        yield (
            f"Memory: rows marked ! do not fit on the device ({SPARE_SHARE:.0%} kept free): up to "
            f"{worst.total / 1e9:.0f} GB of {(worst.memory or 0) / 1e9:.0f} GB. A server would let requests wait, so "
            "these figures are upper bounds."
        )
    slo = query.setting.objective.seconds_per_token
    for workload, group in groupby(points, key=lambda point: point.workload):
        rows = list(group)
        if query.prompt > 1 and {point.first_token_p50 is None for point in rows} == {True, False}:
            yield (
                f"{workload}: some policies ended no request in these rounds and computed no prompt, others did. "
                "Compare them over more --rounds."
            )
        if slo:
            yield _slo_note(workload, slo, rows)
    yield (
        "Columns: vs fixed: against the best fixed depth, plain decoding among them, in tok/s, or per user where "
        "requests arrive by themselves; drafted and admitted are draft tokens a round; tau counts the bonus token."
    )


def _slo_note(workload: str, slo: float, points: Sequence[ReplayPoint]) -> str:
    best = max(points, key=lambda point: (point.within_slo or 0.0, -point.pace_p50))
    where = f"The SLO of {1e3 * slo:g} ms a token, {workload}"
    if not best.within_slo:
        fastest = min(points, key=lambda point: point.pace_p50)
        return (
            f"{where}, cannot be met: with {fastest.policy}, the fastest, half of the requests take "
            f"{1e3 * fastest.pace_p50:.4g} ms a token or more."
        )
    return f"{where}, is met for {best.within_slo:.0%} of the requests by {best.policy}, and by no policy for more."


def as_dict(query: ReplayQuery, points: Sequence[ReplayPoint], options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `wager replay --json`."""
    given = {
        key: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        for key, value in options.items()
        if value is not None and value != () and key != "trace"
    }
    return {
        "setting": {
            "trace": str(options.get("trace") or ""),
            "locality": query.locality,
            **given,
            "step_times": query.step_times,
            "prices": [asdict(price) for price in query.prices],
        },
        "points": [point.as_dict() for point in points],
        "notes": list(notes(query, points)),
    }
