"""What hostile requests leave behind, counted, and the gauges of memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from serve.api_bodies import Call, calls, send
from serve.serving import CHAT, LONG, Running, running
from serve.test_metrics import values
from wager.draft.lookup import LookupDrafter, LookupSources
from wager.serve.metrics import resident_bytes
from wager.types import DraftRequest, SamplingParams

HOSTILE = 300


def hostile_calls() -> list[Call]:
    found: list[Call] = []

    @settings(
        max_examples=HOSTILE,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls())
    def collect(call: Call) -> None:
        found.append(call)

    collect()
    return found


def objects(server: Running) -> Counter[str]:
    """Objects by type, without those of prefixes, which are kept on purpose as long as there are blocks."""
    server.llm.engine.scheduler.block_pool.reset_prefix_cache()
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


def test_hostile_requests_leave_nothing() -> None:
    """The same requests twice: what the first time kept (modules, compiled grammars) is not kept again."""
    sent = hostile_calls()
    with running({"drafter": "ngram"}) as server, server.client() as http:

        def send_all() -> Counter[int]:
            return Counter(send(http, call).status_code for call in sent)

        statuses = send_all()
        send_all()
        before = objects(server)
        tracemalloc.start()
        assert send_all() == statuses and set(statuses) > {200, 400}
        after, kept = objects(server), tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    # Views of the buffers are kept by the sizes of a step, 256 at most.
    grown = +(after - before)
    del grown["PackedBatch"]
    assert sum(grown.values()) < len(sent) / 4, grown.most_common(10)
    assert kept < 500 * len(sent), f"{kept} bytes of {len(sent)} requests"


def test_the_gauges_of_memory() -> None:
    with running({"drafter": "suffix"}) as server:
        fresh = values(server)
        for number in range(3):
            prompt = [{"role": "user", "content": f"{number} " * 60}]
            assert server.post(CHAT, {**LONG, "messages": prompt, "max_tokens": 100}).status_code == 200
        used = values(server)
        plan = server.llm.engine.memory_plan
    assert used["wager:memory_planned_bytes,use=cache"] == plan.cache > 0
    assert used["wager:memory_planned_bytes,use=weights"] == plan.weights > 0
    assert used["wager:drafter_texts_bytes,drafter=suffix"] > fresh["wager:drafter_texts_bytes,drafter=suffix"]
    assert used["wager:process_resident_bytes,kind=anonymous"] > 0 < used["wager:process_resident_bytes,kind=file"]
    reserved, name = plan.cache - plan.draft_cache, "wager:kv_cache_bytes,kind="
    assert used[name + "reserved"] == reserved
    assert fresh[name + "resident"] < used[name + "resident"] <= reserved


def test_where_the_system_does_not_say_what_is_resident(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path / "none") == {}
    (tmp_path / "status").write_text("VmRSS:\t 4 kB\n")
    assert resident_bytes(tmp_path / "status") == {}


def test_texts_that_are_looked_up_are_bounded() -> None:
    """The shared texts have `shared_tokens` tokens at most, and a sequence that ended has no tree of its own."""
    drafter = LookupDrafter("suffix", LookupSources(4, shared_tokens=200))
    sizes = []
    for number in range(300):
        name = f"s{number}"
        drafter.begin(name, [number % 64, number % 7], SamplingParams())
        drafter.accept(name, [(number * step) % 64 for step in range(1, 12)])
        drafter.propose([DraftRequest(name, 13, 3, SamplingParams(), 0)])
        drafter.end(name)
        sizes.append(drafter.nbytes)
    assert 0 < sizes[100] == sizes[200] == sizes[299] < 100_000
