"""The figures of a load test, from answers whose times are written down; two results side by side."""

from __future__ import annotations

import json
import math
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wager.bench.load_answer import FAILURES, TimedAnswer
from wager.bench.load_client import LoadRun
from wager.bench.load_comparison import compare, read_result
from wager.bench.load_figures import GRID, LoadFigures, percentiles, rows, spread_of
from wager.bench.slo import ServiceLevel
from wager.cli import load_text
from wager.errors import UsageError


def answer(
    number: int, due: float, arrivals: list[float], *, tokens: int | None = None, end: float | None = None, **more: Any
) -> TimedAnswer:
    """With a chunk at each of these seconds after it was due, and an end 1 ms after the last."""
    times = array("d", [due + seconds for seconds in arrivals])
    ended = due + end if end is not None else (times[-1] if times else due) + 0.001
    counted = array("q", more.pop("counted", [0] * len(times)))
    made = TimedAnswer(
        number, f"p{number}", "qa", due, due + 0.002, ended, times, counted, ["x"] * len(times), 10, tokens
    )
    made.finish_reason = "stop"
    if "fail" in more:
        made.fail(*more["fail"])
    return made


def run_of(*answers: TimedAnswer, start: float = 100.0, cpu: float = 0.5) -> LoadRun:
    busy = max(a.sent for a in answers if a.sent is not None)
    end = max(a.ended for a in answers)
    return LoadRun(list(answers), start, end, busy, cpu, array("d", [0.001] * 99 + [0.002]), 3)


def figures(*answers: TimedAnswer, users: int | None = 1, slo: str | None = None) -> dict[str, Any]:
    level = ServiceLevel.parse(slo) if slo else None
    return LoadFigures(run_of(*answers), users=users, slo=level).summary()


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentiles(values[::-1], (0, 1, 50, 90, 99, 99.5, 100)) == [1, 1, 50, 90, 99, 100, 100]
    assert percentiles([5.0], (0, 50, 99)) == [5, 5, 5]
    assert percentiles([3.0, 1.0, 2.0], (33, 34, 66, 67)) == [1, 2, 2, 3]
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 1000):
        drawn = rng.exponential(size=size)
        points = (*range(0, 101, 5), 99)
        assert percentiles(list(drawn), points) == list(np.percentile(drawn, points, method="inverted_cdf"))


def test_weighted_percentiles_are_those_of_repeated_values() -> None:
    rng = np.random.default_rng(1)
    values, weights = rng.normal(size=50), rng.integers(0, 5, 50)
    repeated = [float(v) for v, w in zip(values, weights, strict=True) for _ in range(w)]
    points = tuple(range(0, 101, 3))
    assert percentiles(list(values), points, list(map(float, weights)))[1:] == percentiles(repeated, points)[1:]


def test_the_spread_of_nothing_is_unknown() -> None:
    assert spread_of([]) == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None, "count": 0}
    assert spread_of([2.0, 4.0]) == {"mean": 3, "p50": 2, "p90": 4, "p99": 4, "max": 4, "count": 2}


def test_times_and_rates_of_a_run() -> None:
    """Two answers of one token a chunk: 3 tokens 100 ms apart, and 2 tokens 300 ms apart, over 2.001 s."""
    first = answer(0, 100.0, [0.2, 0.3, 0.4], tokens=3)
    second = answer(1, 101.0, [0.7, 1.0], tokens=2)
    found = figures(first, second)
    assert found["requests"] == found["ok"] == 2 and found["failed"] == {}
    assert found["duration_s"] == pytest.approx(2.001)
    assert found["output_tok_s"] == pytest.approx(5 / 2.001)
    assert found["total_tok_s"] == pytest.approx(25 / 2.001)
    assert found["request_s"] == pytest.approx(2 / 2.001)
    assert (found["tokens"], found["chunks"], found["prompt_tokens"]) == (5, 5, 20)
    assert found["ttft_s"]["p50"] == pytest.approx(0.2) and found["ttft_s"]["p99"] == pytest.approx(0.7)
    assert found["itl_s"]["mean"] == pytest.approx((0.1 + 0.1 + 0.3) / 3) and found["itl_s"]["count"] == 3
    assert found["itl_token_s"]["mean"] == pytest.approx(found["itl_s"]["mean"])
    assert found["tpot_s"]["max"] == pytest.approx(0.3) and found["tpot_s"]["p50"] == pytest.approx(0.1)
    assert found["e2e_s"]["max"] == pytest.approx(1.001)
    assert found["steady_tok_s"] == pytest.approx(3 / 1.002), "tokens until the last request was sent"
    assert figures(first, second, users=None)["steady_tok_s"] is None
    assert figures(first, second, users=2)["steady_tok_s"] is None, "each had one request: they were never all busy"
    assert found["client"]["cpu_us_per_chunk"] == pytest.approx(1e5)
    assert found["client"]["send_delay_s"]["p50"] == pytest.approx(0.002)
    assert found["client"]["lag_s"]["p99"] == 0.001 and found["client"]["late"] is False


def test_several_tokens_a_chunk_are_one_gap_by_chunk_and_shares_of_it_by_token() -> None:
    """Chunks of 1, 4 and 1 tokens, 200 ms and 50 ms apart: a reader waits 200 ms, a token takes 50 ms."""
    known = figures(answer(0, 100.0, [0.1, 0.3, 0.35], tokens=6, counted=[1, 5, 6]))
    assert known["chunk_tokens_from"] == "usage" and known["tokens_per_chunk"] == 2
    assert known["itl_s"]["max"] == pytest.approx(0.2) and known["itl_s"]["mean"] == pytest.approx(0.125)
    assert known["itl_token_s"]["p50"] == pytest.approx(0.05) and known["itl_token_s"]["max"] == pytest.approx(0.05)
    assert known["itl_token_s"]["mean"] == pytest.approx(known["tpot_s"]["mean"]) == pytest.approx(0.25 / 5)
    guessed = figures(answer(0, 100.0, [0.1, 0.3, 0.35], tokens=6))
    assert guessed["chunk_tokens_from"] == "estimate"
    assert guessed["itl_token_s"]["max"] == pytest.approx(0.2 / 2.5)
    assert guessed["itl_token_s"]["mean"] == pytest.approx(guessed["tpot_s"]["mean"]) == pytest.approx(0.25 / 5)


def test_tokens_without_a_report_are_chunks_and_the_result_says_so() -> None:
    with_usage, without = answer(0, 100.0, [0.1, 0.2], tokens=4), answer(1, 100.0, [0.1, 0.2, 0.3])
    assert figures(with_usage)["tokens_from"] == "usage"
    assert figures(without)["tokens_from"] == "chunks" and figures(without)["tokens"] == 3
    assert figures(with_usage, without)["tokens_from"] == "mixed"


def test_requests_that_never_ended_are_in_the_percentiles_with_what_they_waited() -> None:
    quick = [answer(n, 100.0, [0.1, 0.2], tokens=2) for n in range(8)]
    silent = answer(8, 100.0, [], end=5.0, fail=("timeout", "no whole answer within 5 s"))
    begun = answer(9, 100.0, [0.3, 0.4], end=5.0, fail=("timeout", "no whole answer within 5 s"))
    found = figures(*quick, silent, begun)
    assert found["ok"] == 8 and found["failed"] == {"timeout": 2}
    assert found["e2e_s"]["p90"] == pytest.approx(5.0) and found["e2e_s"]["count"] == 10
    assert found["ttft_s"]["p90"] == pytest.approx(0.3) and found["ttft_s"]["max"] == pytest.approx(5.0)
    assert found["tokens"] == 16, "tokens of whole answers"


def test_failures_are_counted_and_named_and_not_timed() -> None:
    refused = [answer(n, 100.0, [], end=0.001, fail=("refused", "status 429: full")) for n in range(5)]
    broken = answer(5, 100.0, [0.1], fail=("broken", "it was cut"))
    good = answer(6, 100.0, [0.5, 0.6], tokens=2)
    found = figures(*refused, broken, good)
    assert (found["requests"], found["ok"], found["failed"]) == (7, 1, {"refused": 5, "broken": 1})
    assert found["failures"] == [
        {"kind": "refused", "message": "status 429: full", "count": 5},
        {"kind": "broken", "message": "it was cut", "count": 1},
    ]
    assert found["ttft_s"]["count"] == 1 and found["ttft_s"]["p50"] == pytest.approx(0.5)
    nothing = figures(*refused)
    assert nothing["ok"] == 0 and nothing["ttft_s"]["p50"] is None and nothing["output_tok_s"] == 0


def test_goodput_counts_requests_that_keep_every_objective() -> None:
    good = answer(0, 100.0, [0.1, 0.14, 0.18], tokens=3)
    late = answer(1, 100.0, [0.6, 0.64], tokens=2)
    stalled = answer(2, 100.0, [0.1, 0.12, 0.3, 0.32], tokens=4)
    failed = answer(3, 100.0, [0.1], fail=("broken", "x"))
    one_token = answer(4, 100.0, [0.1], tokens=1)
    found = figures(good, late, stalled, failed, one_token, slo="ttft:500ms,itl:50ms")["goodput"]
    assert found["slo"] == {"ttft": 0.5, "itl": 0.05}
    assert (found["requests"], found["share"]) == (2, 0.4)
    assert found["missed"] == {"ttft": 1, "itl": 1, "failed": 1}
    assert found["request_s"] == pytest.approx(2 / 0.641) and found["tok_s"] == pytest.approx(4 / 0.641)
    assert figures(stalled, slo="tpot:80ms")["goodput"]["share"] == 1
    assert figures(stalled, slo="tpot:70ms,e2e:1s")["goodput"]["missed"] == {"tpot": 1}
    assert figures(good, slo="e2e:182ms")["goodput"]["requests"] == 1
    assert figures(good, slo="e2e:180ms")["goodput"]["requests"] == 0


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "''"),
        ("ttft", "'ttft'"),
        ("tft:5ms", "tft"),
        ("ttft:5", "not a time"),
        ("ttft:1ms,ttft:2ms", "twice"),
        ("ttft:1ms,", "''"),
        ("p99:1ms", "p99"),
        ("ttft:-1ms", "not a time"),
        ("ttft:1e9s", "out of range"),
    ],
)
def test_objectives_that_are_none_are_refused(text: str, cause: str) -> None:
    with pytest.raises(UsageError, match="--slo") as refused:
        ServiceLevel.parse(text)
    assert cause in str(refused.value)


def test_a_late_client_says_so() -> None:
    run = run_of(answer(0, 100.0, [0.5], tokens=1), cpu=0.4)
    assert LoadFigures(run, users=1).summary()["client"]["late"] is True, "more than half of a processor"
    run = run_of(answer(0, 100.0, [0.5], tokens=1), cpu=0.0)
    assert LoadFigures(run, users=1).summary()["client"]["late"] is False
    run.lags = array("d", [0.001] * 90 + [0.05] * 10)
    assert LoadFigures(run, users=1).summary()["client"]["late"] is True


def test_the_timeline_has_every_token_and_who_waited() -> None:
    run = run_of(answer(0, 100.0, [0.0, 5.0, 10.0], tokens=5, end=10.0), answer(1, 105.0, [1.0], tokens=1, end=2.0))
    line = LoadFigures(run, users=1).timeline()
    assert line["bin_s"] == pytest.approx(10 / 200)
    assert sum(line["tokens"]) == 6 and line["tokens"][0] == 1 and line["tokens"][-1] == 2
    assert line["requests"][0] == 1 and line["requests"][110] == 2 and line["requests"][150] == 1


def result_of(*answers: TimedAnswer, model: str = "m", **settings: Any) -> dict[str, Any]:
    run = run_of(*answers)
    found = LoadFigures(run, users=1)
    return {
        "card": {"kind": "load", "model": model, "date": "today", "settings": {"concurrency": 1, **settings}},
        "rows": rows(run.answers, None),
        "summary": found.summary(),
        "distributions": found.distributions(),
        "timeline": found.timeline(),
    }


def test_results_side_by_side() -> None:
    slow = result_of(answer(0, 100.0, [0.2, 0.4], tokens=2), answer(1, 100.0, [0.2, 0.4], tokens=2), url="a")
    fast = result_of(
        answer(0, 100.0, [0.1, 0.2], tokens=2), answer(1, 100.0, [0.1, 0.2], tokens=2), concurrency=2, url="b"
    )
    fast["rows"][1]["text"] = "y"
    found = compare(fast, slow)
    assert found["ratios"]["ttft_s.p50"] == pytest.approx(0.5)
    assert found["ratios"]["output_tok_s"] == pytest.approx(0.401 / 0.201)
    assert found["settings"] == {"concurrency": [2, 1]}
    assert (found["texts"], found["same_text"]) == (2, 1)
    assert all(ratio is None or math.isclose(ratio, 1) for ratio in compare(slow, slow)["ratios"].values())


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        (90, 10, "90%, before 10%: its cache was warm now and cold before"),
        (0, 80, "0%, before 80%: its cache was warm before and cold now"),
        (12, 10, ""),
        (90, None, ""),
    ],
)
def test_a_warm_cache_is_not_compared_with_a_cold_one_unsaid(
    now: int, before: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [result_of(answer(0, 100.0, [0.2, 0.4], tokens=2)) for _ in range(2)]
    for result, cached in zip(results, (now, before), strict=True):
        result["summary"] |= {"prompt_tokens": 100, "cached_prompt_tokens": cached}
    results[0]["compare"] = compare(*results)
    results[0]["card"]["url"] = "u"
    assert results[0]["compare"]["cached_share"] == [now / 100, None if before is None else before / 100]
    load_text.show(results[0], to_stdout=True)
    text = " ".join(capsys.readouterr().out.split())
    assert said in text if said else "from the server's cache" not in text


def test_a_result_is_read_back_and_what_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    result = result_of(answer(0, 100.0, [0.2, 0.4], tokens=2))
    path.write_text(json.dumps(result))
    assert read_result(path) == json.loads(path.read_text())
    assert len(result["distributions"]["ttft_s"]) == len(GRID)
    bench = {**result, "card": {"model": "m", "settings": {}}}
    lacking = {**result, "summary": {**result["summary"], "ttft_s": {"p50": "x"}}}
    curves = {**result, "distributions": {"ttft_s": [1.0]}}
    line = {**result, "timeline": {**result["timeline"], "tokens": ["x"]}}
    goodput = {**result, "summary": {**result["summary"], "goodput": 3}}
    wrong = [bench, {**result, "rows": {}}, lacking, curves, line, goodput]
    for text in ("no", "[]", "{}", *map(json.dumps, wrong)):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"before\.json"):
            read_result(path)


def test_the_page_lists_every_field_and_every_failure() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench-load.md").read_text(encoding="utf-8")
    level = ServiceLevel.parse("ttft:1s")
    run = run_of(answer(0, 100.0, [0.1, 0.2], tokens=2))
    found = LoadFigures(run, users=1, slo=level)
    summary = found.summary()
    listed = re.findall(r'"rows":\s+\[\{(.*?)\}\]', page, re.DOTALL)[0]
    assert re.findall(r'"(\w+)"', listed) == list(rows(run.answers, level)[0])
    listed = re.findall(r'"summary": \{(.*?)\}\},\n "distributions"', page, re.DOTALL)[0]
    parts = [key for name in ("goodput", "client") for key in summary[name]]
    assert set(re.findall(r'"(\w+)"', listed)) == {*summary, *parts, "kind", "message", "count"}
    assert re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE) == list(FAILURES)
    assert set(found.timeline()) == set(re.findall(r'"(\w+)"', re.findall(r'"timeline": \{(.*?)\}', page)[0]))
