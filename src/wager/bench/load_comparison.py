"""Two results of load tests side by side: ratios of their figures, what was set differently, texts that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wager.bench.load_figures import GRID, PERCENTILES
from wager.errors import UsageError
from wager.inputs import read_text

RATES = ("output_tok_s", "steady_tok_s", "total_tok_s", "request_s")
TIMES = ("ttft_s", "itl_s", "itl_token_s", "tpot_s", "e2e_s")
KIND = "load"
"""The `kind` of a load test's card."""

_MAY_DIFFER = ("url", "duration", "timeout", "warm_up", "compare_with", "plot")


def read_result(path: Path) -> dict[str, Any]:
    """An earlier result. UsageError if the file is not one."""
    hint = "Give a file that `wager bench --url URL --json FILE` wrote."
    text = read_text(path, "result", hint)
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON.", hint) from error
    parts = {"card": dict, "summary": dict, "rows": list, "distributions": dict, "timeline": dict}
    whole = isinstance(result, dict) and all(isinstance(result.get(key), kind) for key, kind in parts.items())
    if not whole or result["card"].get("kind") != KIND or not isinstance(result["card"].get("settings"), dict):
        raise UsageError(f"{path} is not the result of a load test.", hint)
    for name in TIMES:
        spread = result["summary"].get(name)
        if not isinstance(spread, dict) or not all(_is_number(spread.get(f"p{point}")) for point in PERCENTILES):
            raise UsageError(f"{path} lacks the percentiles of {name}.", hint)
    line = result["timeline"]
    curves = [*result["distributions"].values(), line.get("tokens"), line.get("requests"), [line.get("bin_s")]]
    lengths = {len(curve) for curve in result["distributions"].values() if isinstance(curve, list)}
    if not all(map(_are_numbers, curves)) or lengths - {len(GRID)}:
        raise UsageError(f"{path} lacks the curves of a load test.", hint)
    if not isinstance(result["summary"].get("goodput"), dict | None):
        raise UsageError(f"{path} has a goodput that is none.", hint)
    return dict(result)


def compare(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios, now over before, of rates and of times; None where either is unknown or 0. `settings` are options and
    models that differ, so that the ratios may have another cause, as `cached_share` may, now and before; `same_text`
    counts answers to the same request."""
    new, old = now["summary"], before["summary"]
    ratios: dict[str, float | None] = {name: _ratio(new.get(name), old.get(name)) for name in RATES}
    for name in TIMES:
        for key in ("mean", *(f"p{point}" for point in PERCENTILES)):
            ratios[f"{name}.{key}"] = _ratio(new[name][key], old[name].get(key))
    goods = [summary.get("goodput") or {} for summary in (new, old)]
    if goods[0].get("slo") == goods[1].get("slo"):
        ratios["goodput.request_s"] = _ratio(*[good.get("request_s") for good in goods])
    return {
        "before": {"model": before["card"].get("model"), "date": before["card"].get("date")},
        "ratios": ratios,
        "settings": _differing(now["card"], before["card"]),
        "cached_share": [_cached_share(new), _cached_share(old)],
        **_texts(now["rows"], before["rows"]),
    }


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name -> its value now and before."""
    new, old = ({"model": card.get("model"), **card["settings"]} for card in (now, before))
    names = [name for name in dict.fromkeys([*new, *old]) if name not in _MAY_DIFFER]
    return {name: [new.get(name), old.get(name)] for name in names if new.get(name) != old.get(name)}


def _texts(now: Sequence[Any], before: Sequence[Any]) -> dict[str, int]:
    """Answers to the same request in both, and how many of them are the same text."""
    old = {row.get("number"): row for row in before if isinstance(row, dict) and row.get("outcome") == "ok"}
    pairs = [(row, old[row["number"]]) for row in now if row["outcome"] == "ok" and row["number"] in old]
    pairs = [(a, b) for a, b in pairs if a["id"] == b.get("id")]
    return {"texts": len(pairs), "same_text": sum(a["text"] == b.get("text") for a, b in pairs)}


def _cached_share(summary: Mapping[str, Any]) -> float | None:
    """The share of the prompts' tokens that the server had in its cache, if it said so."""
    return _ratio(summary.get("cached_prompt_tokens"), summary.get("prompt_tokens"))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(value is not None and _is_number(value) for value in values)


def _ratio(now: Any, before: Any) -> float | None:
    return now / before if _is_number(now) and _is_number(before) and now is not None and before else None
