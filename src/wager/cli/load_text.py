"""Results of `wager bench --url` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wager.bench.load_comparison import RATES, TIMES
from wager.terminal import console

_NAMES = {
    "ttft_s": "TTFT",
    "itl_s": "ITL, by chunk",
    "itl_token_s": "ITL, by token",
    "tpot_s": "TPOT",
    "e2e_s": "end to end",
    "output_tok_s": "tokens/s",
    "steady_tok_s": "tokens/s, all users busy",
    "total_tok_s": "tokens/s with prompts",
    "request_s": "requests/s",
    "goodput.request_s": "goodput, requests/s",
}
_ALIKE = 0.05
"""Difference of the shares of cached prompt tokens up to which two runs are said to be alike: a chat template's first
tokens are cached in any."""

_SPREAD = ("mean", "p50", "p90", "p99", "max")


def show(result: Mapping[str, Any], *, to_stdout: bool) -> None:
    """The times of all requests, then rates, failures and the comparison, if there is one."""
    summary = result["summary"]
    rows = [[_NAMES[name], *(_ms(summary[name][key]) for key in _SPREAD)] for name in TIMES]
    title = f"{result['card']['model']} at {result['card']['url']}"
    console.table(title, ["ms", *_SPREAD], rows, to_stdout=to_stdout, caption="\n".join(_lines(summary)))
    for failure in summary["failures"]:
        console.say(f"{failure['count']} failed ({failure['kind']}): {failure['message']}")
    if summary["client"]["late"]:
        console.say("The client itself was busy or late: its own delays are part of these times.")
    if "compare" in result:
        _show_comparison(result["compare"], to_stdout=to_stdout)


def _lines(summary: Mapping[str, Any]) -> list[str]:
    steady = summary["steady_tok_s"]
    lines = [
        f"{summary['output_tok_s']:.1f} tokens/s, {summary['request_s']:.3g} requests/s"
        + (f"; {steady:.1f} tokens/s while all users were busy" if steady is not None else ""),
        f"{summary['ok']} of {summary['requests']} requests answered in {summary['duration_s']:.1f} s; "
        f"{summary['tokens']} tokens (counted by {summary['tokens_from']}) in {summary['chunks']} chunks",
    ]
    if summary["chunk_tokens_from"] != "usage" and (summary["tokens_per_chunk"] or 0) > 1.01:
        lines.append("chunks of several tokens, whose number is estimated in ITL by token (see --chunk-usage)")
    good = summary["goodput"]
    if good:
        share = 100 * (good["share"] or 0.0)
        missed = ", ".join(f"{name} {count}" for name, count in good["missed"].items())
        lines.append(
            f"goodput {good['request_s']:.3g} requests/s: {share:.1f} % kept the SLO"
            + (f" (missed: {missed})" if missed else "")
        )
    client = summary["client"]
    cost = client["cpu_us_per_chunk"]
    lines.append(
        f"client: {100 * client['cpu_share']:.1f} % of a processor"
        + (f", {cost:.0f} µs a chunk" if cost is not None else "")
        + f", late by {_ms(client['lag_s']['p99'])} ms (p99)"
    )
    return lines


def _show_comparison(compare: Mapping[str, Any], *, to_stdout: bool) -> None:
    ratios = compare["ratios"]
    rows = [
        [_NAMES[name], _ratio(ratios[name]), "", "", ""]
        for name in (*RATES, "goodput.request_s")
        if ratios.get(name) is not None
    ]
    rows += [[_NAMES[name], *(_ratio(ratios[f"{name}.{key}"]) for key in _SPREAD[:-1])] for name in TIMES]
    lines = [f"{compare['same_text']} of {compare['texts']} answers to the same request are the same text"]
    for name, (now, before) in compare["settings"].items():
        lines.append(f"not alike: {name} = {now!r}, before {before!r}")
    lines += _caches(*compare["cached_share"])
    before = f"{compare['before']['model']}, {compare['before']['date']}"
    columns = ["now / before", "mean", *_SPREAD[1:-1]]
    console.table(f"Against {before}", columns, rows, to_stdout=to_stdout, caption="\n".join(lines))


def _caches(now: float | None, before: float | None) -> list[str]:
    """Said where one of the runs found more of its prompts in the server's cache than the other."""
    if now is None or before is None or abs(now - before) < _ALIKE:
        return []
    warm, cold = ("now", "before") if now > before else ("before", "now")
    return [
        f"prompt tokens from the server's cache: {now:.0%}, before {before:.0%}: its cache was warm {warm} and cold "
        f"{cold}, which changes the ratios; start the server anew before each run"
    ]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
