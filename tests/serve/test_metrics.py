"""Metrics: what Prometheus reads agrees with what clients were told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve.serving import CHAT, Running, running
from wager.engine.draft_counts import DrafterCounts

MESSAGES: Any = [{"role": "user", "content": "one two three one two three one two three"}]
BODY: Any = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "speculation_stats": True}


def values(server: Running) -> Mapping[str, float]:
    """Every sample by its name and labels (but the model's)."""
    with server.client() as http:
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sample.labels.items() if name not in ("model_name", "le")]
            if "le" not in sample.labels:
                found[",".join([sample.name, *sorted(labels)])] = sample.value
    return found


def test_counters_are_those_of_the_answers() -> None:
    with running() as server:
        answers = [server.post(CHAT, {**BODY, "n": n}).json() for n in (1, 2)]
        assert server.post(CHAT, {**BODY, "max_tokens": 0}).status_code == 400
        assert server.post("/no/such/path", {}).status_code == 404
        found = values(server)
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
    assert found["wager:inter_token_latency_seconds_count"] == rounds - 3
    assert found["wager:step_stage_seconds_total,stage=forward"] > 0
    assert found["wager:num_requests_running"] == found["wager:num_requests_waiting"] == 0
    assert found["wager:http_requests_total,path=/v1/chat/completions,status=200"] == 2
    assert found["wager:http_requests_total,path=/v1/chat/completions,status=400"] == 1
    assert found["wager:http_requests_total,path=other,status=404"] == 1
    assert found["wager:drafter_collapsed,drafter=ngram"] == 0


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
        found = values(server)
    assert {f"wager:{name}" for name in VLLM.split()} <= {*families}
    assert families["wager:iteration_tokens_total"].type == "histogram"
    assert found["wager:request_params_n_sum"] == 4 and found["wager:request_params_max_tokens_sum"] == 120
    assert found["wager:prefix_cache_queries_total"] == 4 * again["prompt_tokens"]
    assert found["wager:prefix_cache_hits_total"] >= again["prompt_tokens_details"]["cached_tokens"] > 0
    assert found["wager:request_inference_time_seconds_sum"] > found["wager:request_decode_time_seconds_sum"] > 0


def test_what_the_adaptive_policy_expects_and_gets() -> None:
    with running({"depth": None}) as server:
        for _ in range(3):
            server.post(CHAT, {**BODY, "max_tokens": 200})
        found = values(server)
    assert found["wager:plain_step_seconds"] > 0
    assert found["wager:predicted_speedup"] > 0 < found["wager:observed_speedup"]
    assert found["wager:row_cost_tokens"] >= 0


def test_requests_of_vanished_clients_count_as_aborted() -> None:
    with running() as server, server.client() as http:
        with http.stream("POST", CHAT, json={**BODY, "max_tokens": 400, "stream": True}) as answer:
            next(answer.iter_lines())
        server.post(CHAT, BODY)
        assert values(server)["wager:request_success_total,finished_reason=abort"] == 1
        assert server.server.metrics._times == {}


def test_positions_are_counted_from_lengths() -> None:
    counts = DrafterCounts(verified=[0, 2, 0, 4], accepted=[1, 2, 0, 3])
    assert (counts.drafts, counts.verified_tokens, counts.accepted_tokens) == (6, 14, 11)
    assert counts.accepted_by_position == [5, 3, 3]
