"""Figures of the server: metrics agree with what clients were told, and the dashboard's numbers with both."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serve.api_bodies import hostile_calls, send
from serve.serving import CHAT, LONG, eventually, running
from wager.bench.scrape import Scrape
from wager.economics.policy.heuristics import FixedDepth
from wager.engine.rounds import DraftCounter, DrafterCounts
from wager.engine.wrapped_policies import DraftOfSeveral
from wager.serve import live
from wager.serve.live import PAGE_PATHS
from wager.serve.metrics import StepTotals, WeightedHistogram
from wager.serve.responses import ResponseStore
from wager.types import Draft, OutputDelta, StepRecord

MESSAGES: Any = [{"role": "user", "content": "one two three one two three one two three"}]
BODY: Any = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "speculation_stats": True}


def test_counters_are_those_of_the_answers() -> None:
    with running() as server:
        answers = [server.post(CHAT, {**BODY, "n": n}).json() for n in (1, 2)]
        assert server.post(CHAT, {**BODY, "max_tokens": 0}).status_code == 400
        assert server.post("/no/such/path", {}).status_code == 404
        found = server.metrics()
        with server.client() as http:
            counted = Scrape.parse(http.get("/metrics").text, server.url).speculation()
    usage = [answer["usage"] for answer in answers]
    choices = [choice for answer in answers for choice in answer["speculation"]["choices"]]
    assert found["wager:generation_tokens_total"] == 180 == sum(each["completion_tokens"] for each in usage)
    assert found["wager:prompt_tokens_total"] == sum(each["prompt_tokens"] for each in usage)
    assert found["wager:request_success_total,finished_reason=length"] == 3
    accepted = sum(choice["accepted"] for choice in choices)
    assert found["wager:spec_decode_num_accepted_tokens_total,drafter=ngram"] == accepted > 0
    drafted = sum(choice["drafted"] for choice in choices)
    assert found["wager:spec_decode_num_draft_tokens_total,drafter=ngram"] == drafted
    by_position = [
        found.get(f"wager:spec_decode_num_accepted_tokens_per_pos_total,drafter=ngram,position={at}", 0)
        for at in range(3)
    ]
    assert sum(by_position) == accepted and by_position == sorted(by_position, reverse=True)
    assert found["wager:time_to_first_token_seconds_count"] == 3
    assert found["wager:e2e_request_latency_seconds_count"] == 3
    rounds = sum(choice["rounds"] for choice in choices)
    assert found["wager:inter_token_latency_seconds_count"] == rounds - 3 and counted.rounds == rounds
    assert sum(counted.reaching) == drafted and counted.reaching[0] == counted.drafts
    assert (sum(counted.accepted), counted.drafted, counted.by.drafter) == (accepted, drafted, "ngram")
    assert found["wager:step_stage_seconds_total,stage=forward"] > 0
    assert found["wager:num_requests_running"] == found["wager:num_requests_waiting"] == 0
    assert found["wager:http_requests_total,path=/v1/chat/completions,status=200"] == 2
    assert found["wager:http_requests_total,path=/v1/chat/completions,status=400"] == 1
    assert found["wager:http_requests_total,path=other,status=404"] == 1
    assert found["wager:drafter_collapsed,drafter=ngram"] == 0


def test_sums_over_answers_are_the_counters() -> None:
    """Also of texts that end within accepted guesses, of guesses that a grammar forces, of several choices, and of
    streams."""
    with running() as server:
        first = server.chat(**BODY)
        text = first["choices"][0]["message"]["content"]
        stops = [{**BODY, "stop": text[at : at + 14]} for at in range(60, 120, 9)]
        answers = [first, *(server.chat(**body) for body in ({**BODY, "n": 3}, *stops))]
        body = {**BODY, "stream_options": {"include_usage": True}}
        *_, usage, speculation = server.streamed(body)
        answers.append({"usage": usage["usage"], "speculation": speculation["speculation"]})
        answers.append(server.chat(**BODY | {"ignore_eos": False, "guided_choice": ["all of this is forced"]}))
        found, live = server.metrics(), server.live()
        assert not server.server.metrics.drafts._sequences, "nothing is kept of what has ended"
    choices = [choice for answer in answers for choice in answer["speculation"]["choices"]]
    used = {name: sum(each["usage"][name] for each in answers) for name in ("prompt_tokens", "completion_tokens")}
    cached = sum(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers)
    rounds, drafted, accepted = (sum(each[name] for each in choices) for name in ("rounds", "drafted", "accepted"))
    forced = found["wager:spec_decode_num_accepted_tokens_total,drafter=grammar"]
    passes = [sum(each["rounds"] for each in answer["speculation"]["choices"]) for answer in answers]
    guessed = [sum(each["accepted"] for each in answer["speculation"]["choices"]) for answer in answers]
    cut = [p + g > answer["usage"]["completion_tokens"] for p, g, answer in zip(passes, guessed, answers, strict=True)]
    assert any(cut), "some end with a guess, with others accepted behind it"
    wanted = {
        "prompt_tokens_total": used["prompt_tokens"],
        "prompt_tokens_cached_total": cached,
        "generation_tokens_total": used["completion_tokens"],
        "rounds_total": rounds,
        "spec_decode_num_drafted_tokens_total,drafter=grammar": forced,
        "spec_decode_num_draft_tokens_total,drafter=grammar": forced,
        "spec_decode_num_draft_tokens_total,drafter=ngram": drafted - forced,
        "spec_decode_num_accepted_tokens_total,drafter=ngram": accepted - forced,
        "request_spec_decode_draft_tokens_sum": drafted,
        "request_spec_decode_accepted_tokens_sum": accepted,
        "request_spec_decode_draft_tokens_count": len(choices),
        "request_spec_decode_mean_acceptance_length_count": len(choices),
        "request_spec_decode_mean_acceptance_length_sum": sum(each["mean_acceptance_length"] for each in choices),
        "request_generation_tokens_sum": used["completion_tokens"],
    }
    assert {name: found[f"wager:{name}"] for name in wanted} == pytest.approx(wanted)
    for position in range(3):
        labels = f"drafter=ngram,position={position}"
        verified = found[f"wager:spec_decode_num_draft_tokens_per_pos_total,{labels}"]
        assert verified >= found[f"wager:spec_decode_num_accepted_tokens_per_pos_total,{labels}"] > 0
        assert 0 < found[f"wager:request_spec_decode_acceptance_rate_count,{labels}"] <= len(choices)
    drafts = live["drafts"]["ngram"]
    assert drafts["drafted"] == found["wager:spec_decode_num_drafted_tokens_total,drafter=ngram"] >= drafts["verified"]
    assert (drafts["verified"], drafts["accepted"]) == (drafted - forced, accepted - forced)
    assert (live["tokens"], live["rounds"]) == (used["completion_tokens"], rounds) and forced > 1
    taus = [sum(int(each["mean_acceptance_length"]) == tau for each in choices) for tau in range(5)]
    assert live["requests_by_tau"] == taus[: len(live["requests_by_tau"])] and sum(taus) == len(choices)


def test_every_choice_that_a_client_left_is_counted() -> None:
    with running() as server, server.client() as http:
        with http.stream("POST", CHAT, json={**LONG, "n": 3, "stream": True}) as answer:
            next(answer.iter_lines())
        eventually(server.is_idle, "a client that has gone is answered")
        found = server.metrics()
    assert found["wager:request_success_total,finished_reason=abort"] == 3 == found["wager:request_params_n_sum"]


VLLM = """
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions prompt_tokens prompt_tokens_cached
generation_tokens prefix_cache_queries prefix_cache_hits request_success request_prompt_tokens
request_generation_tokens request_params_n request_params_max_tokens iteration_tokens_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds spec_decode_num_drafts
spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
"""


def test_names_are_those_of_vllm() -> None:
    """Of its v1 engine, as its own source declares them."""
    with running() as server:
        server.post(CHAT, {**BODY, "n": 3})
        again = server.post(CHAT, BODY).json()["usage"]
        with server.client() as http:
            families = {each.name: each for each in text_string_to_metric_families(http.get("/metrics").text)}
        found = server.metrics()
    assert {f"wager:{name}" for name in VLLM.split()} <= {*families}
    assert families["wager:iteration_tokens_total"].type == "histogram"
    assert found["wager:request_params_n_sum"] == 4 and found["wager:request_params_max_tokens_sum"] == 120
    assert found["wager:prefix_cache_queries_total"] == 4 * again["prompt_tokens"]
    assert found["wager:prefix_cache_hits_total"] >= again["prompt_tokens_details"]["cached_tokens"] > 0
    assert found["wager:request_inference_time_seconds_sum"] > found["wager:request_decode_time_seconds_sum"] > 0


def test_a_histogram_of_many_equal_values_says_what_the_librarys_says() -> None:
    bounds = (0.001, 0.0025, 0.1, 1, 60)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counted = WeightedHistogram("wager:seconds", "Words.", bounds, model="m")
    ours.register(counted)
    observed = Histogram("wager:seconds", "Words.", ("model_name",), registry=theirs, buckets=bounds).labels("m")
    for times, seconds in enumerate((*bounds, 0.0, 0.0011, 0.5, 1000.0), 1):
        counted.add(seconds, times)
        for _ in range(times):
            observed.observe(seconds)
    values, wanted = (
        {name: float(value) for name, _, value in (line.rpartition(" ") for line in text if "{" in line)}
        for text in (generate_latest(each).decode().splitlines() for each in (ours, theirs))
    )
    assert values == pytest.approx({name: value for name, value in wanted.items() if "_created" not in name})


# ---- memory ----------------------------------------------------------------------------------------------------------


HOSTILE, SEED = 300, 2
TIMES, LEFT = 4, 400
"""How often it is sent again, and bytes a request."""


def traced() -> Counter[str]:
    """Bytes taken since the tracing began and not given back, by file. Views of buffers are not counted: they are kept
    by the sizes of a step, 256 at most, and which sizes there are depends on time."""
    gc.collect()
    filters = [tracemalloc.Filter(False, name) for name in ("*/kernels/inputs.py", tracemalloc.__file__)]
    found = tracemalloc.take_snapshot().filter_traces(filters).statistics("filename")
    return Counter({each.traceback[0].filename: each.size for each in found})


@pytest.mark.slow
def test_hostile_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests again and again. What a request left would be left each time; a cache that fills, a module
    that is loaded, a table that doubles are seen once. So the least of some times counts: some 30 kB. Answers of
    /v1/responses, which are kept for an hour and within 16 MB, are not counted: one with log-probabilities has 240 kB,
    and whether the sample has one depends on the modules that were imported before (Hypothesis reads their constants).
    """
    monkeypatch.setattr(live, "_SPAN_S", 2)  # the page's history, which would grow for three minutes
    sent = hostile_calls(HOSTILE, SEED)
    with running({"drafter": "ngram"}) as server, server.client() as http:

        def send_all() -> Counter[int]:
            statuses = Counter(send(http, call).status_code for call in sent)
            eventually(server.is_idle, "something runs after the last answer")
            server.server.generation.kept = ResponseStore()
            return statuses

        statuses = send_all()
        assert set(statuses) > {200, 400}
        tracemalloc.start()
        try:
            held = []
            for _ in range(2 + TIMES):
                assert send_all() == statuses
                held.append(traced())
                kept = [after.total() - before.total() for before, after in pairwise(held)]
                if kept and min(kept) < LEFT * HOSTILE:
                    break
        finally:
            tracemalloc.stop()
        assert server.llm.failure is None
    assert min(kept) < LEFT * HOSTILE, f"each time kept {kept} bytes; by file {(held[-1] - held[-2]).most_common(5)}"


def test_the_gauges_of_memory() -> None:
    with running({"drafter": "suffix"}) as server:
        fresh = server.metrics()
        for number in range(3):
            prompt = [{"role": "user", "content": f"{number} " * 60}]
            assert server.post(CHAT, {**LONG, "messages": prompt, "max_tokens": 100}).status_code == 200
        used = server.metrics()
        plan = server.llm.engine.memory_plan
    assert used["wager:memory_planned_bytes,use=cache"] == plan.cache > 0
    assert used["wager:memory_planned_bytes,use=weights"] == plan.weights > 0
    assert used["wager:drafter_texts_bytes,drafter=suffix"] > fresh["wager:drafter_texts_bytes,drafter=suffix"]
    assert used["wager:process_resident_bytes,kind=anonymous"] > 0 < used["wager:process_resident_bytes,kind=file"]
    reserved, name = plan.cache - plan.draft_cache, "wager:kv_cache_bytes,kind="
    assert used[name + "reserved"] == reserved
    assert fresh[name + "resident"] < used[name + "resident"] <= reserved


# ---- the dashboard's numbers, without a browser ----------------------------------------------------------------------


def test_every_file_of_the_page_is_served_without_a_key_and_may_load_nothing_else() -> None:
    folder = Path(live.__file__).parent / "dashboard"
    assert {f"/{path.name}" for path in folder.iterdir()} - {"/index.html"} == set(PAGE_PATHS) - {"/"}
    with running(api_keys=("correct-horse-battery",)) as server, server.client() as http:
        assert http.get("/live").status_code == 401
        for path in PAGE_PATHS:
            answer = http.get(path)
            assert answer.status_code == 200 and answer.text.strip()
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "<style" not in (page := http.get("/").text) and "style=" not in page and "onclick" not in page


def test_the_server_keeps_its_last_minutes_for_a_page_that_is_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_PERIOD_S", 0.05)
    monkeypatch.setattr(live, "_FRESH_S", 0.0)
    with running() as server:
        eventually(lambda: len(server.live()["samples"]) > 1, "no samples while nothing runs")
        server.chat(**BODY)
        eventually(lambda: any(each["speed"] > 0 for each in server.live()["samples"]), "no sample of the answer")
        with server.client() as http:
            now = http.get("/live").json()
            at = [each["at"] for each in now["samples"]]
            newer = [each["at"] for each in http.get(f"/live?since={at[1]}").json()["samples"]]
            assert newer[: len(at) - 2] == at[2:]
            for other in ("1e9", "nan", "x"):  # a page that was open while the server was started anew
                assert len(http.get(f"/live?since={other}").json()["samples"]) >= len(at)
    [busy, *_] = [each for each in now["samples"] if each["speed"] > 0]
    assert busy["stages"]["forward"] > 0 and "observed" in busy and now["samples"][0]["stages"] is None
    assert now["base"]["tokens"] == 0 < now["tokens"], "the counters of three minutes ago, or of the start"


def test_drafts_are_counted_by_their_depth_and_by_their_guesses() -> None:
    tree = Draft("s", (1, 2, 3, 4), (-1, 0, 0, 1), drafter="suffix")  # three deep
    chain = Draft.chain("s", (1, 2), drafter="suffix")
    forced = DraftOfSeveral("s", (1, 2, 3), (-1, 0, 1), drafter="ngram", drafters=("grammar", "ngram", "ngram"))
    counter, totals = DraftCounter(FixedDepth(3)), StepTotals()
    for number, (draft, drafted_by) in enumerate(
        ((tree, ("suffix", "suffix", "")), (chain, ("",)), (forced, ("grammar", "ngram", "")))
    ):
        record = StepRecord(4, 1, len(draft), 2, 3, {})
        assert counter.admit({"s": draft}, 99)
        counter.observe(record)
        delta = OutputDelta("s", 0, (9,) * len(drafted_by), "", drafted_by, finish_reason="stop" if number else None)
        ended = counter.count([delta], record)
        totals.add(record, [delta, OutputDelta("t", 0, finish_reason="error")])  # a choice that emitted nothing
        assert ended == ({} if not number else {"s": ended["s"]})
    assert set(ended["s"]) == {"grammar", "ngram"} and totals.rounds == totals.steps == 3
    assert counter.drafters["suffix"] == DrafterCounts([0, 0, 1, 0, 1], [1, 0, 1], [0, 0, 1, 1])
    assert counter.drafters["ngram"] == DrafterCounts([0, 0, 1], [0, 1], [0, 0, 1])
    assert counter.drafters["grammar"] == DrafterCounts([0, 1], [0, 1], [0, 1])
