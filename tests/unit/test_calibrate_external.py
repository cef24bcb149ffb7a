"""`wager calibrate --table` and `--url`: step times of engines other than this one, and plans made with them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_load import DONE, LAST, STREAM, Step, event, part, response, scripted

from in_process import Call, refused
from serve.serving import running
from wager.economics.surface import LatencySurface
from wager.kernels.base import TargetOutput
from wager.types import PackedBatch

TRUTH = LatencySurface(
    [1, 16, 64, 256, 1024],
    [8e-3, 8.4e-3, 9e-3, 14e-3, 40e-3],
    per_request=4e-6,
    per_context=3e-9,
    per_pair=2e-10,
)
HEADER = "batch,rows,context,seconds,kernel"


def profile() -> list[dict[str, Any]]:
    """Steps of that surface as a GPU's profile has them, each off by about 1 %."""
    noise = random.Random(0)
    return [
        {"rows": batch * rows, "context": context, "batch": batch, "kernel": "fa3"}
        | {"seconds": TRUTH.seconds(batch * rows, batch, batch * context) * noise.gauss(1, 0.01)}
        for batch in (1, 4, 16, 64, 256)
        for rows in (1, 2, 4)
        for context in (128, 1024, 8192)
    ]


def as_csv(steps: Sequence[dict[str, Any]]) -> str:
    return "\n".join([HEADER, *(",".join(str(step[name]) for name in HEADER.split(",")) for step in steps), ""])


@pytest.mark.parametrize(("suffix", "write"), [("csv", as_csv), ("json", json.dumps)])
def test_a_machines_table_makes_the_plans_step_times(
    wager: Call, tmp_path: Path, suffix: str, write: Callable[[Any], str]
) -> None:
    (table := tmp_path / f"h100.{suffix}").write_text(write(profile()))
    made = wager("calibrate", "--table", str(table), "--model", "Llama-3.1-8B", "--json", str(tmp_path / "times.json"))
    assert made.code == 0, made.err
    assert "columns of" in made.err and "not used: kernel" in made.err
    value = json.loads((tmp_path / "times.json").read_text())
    assert value["errors"]["count"] == 45 and value["errors"]["median"] < 0.02 and value["errors"]["worst"] < 0.06
    call = ["--model", "Llama-3.1-8B", "--hardware", str(tmp_path / "times.json")]
    plan = wager("plan", *call, more="--batch 8,48 --context 2000 --depth 2 --json -")
    assert plan.code == 0 and plan.err == "", plan.err
    for point in json.loads(plan.out)["points"]:
        batch = point["batch"]
        assert point["plain_s"] == pytest.approx(TRUTH.seconds(batch, batch, batch * 2000), rel=0.03)
        assert point["step_s"] == pytest.approx(TRUTH.seconds(3 * batch, batch, batch * 2000), rel=0.03)
    replayed = wager("replay", *call, more="--concurrency 4 --rounds 100 --policy none")
    assert "Llama-3.1-8B on h100 (a table of 45 steps, bf16" in replayed.out
    refused(wager("plan", *call[2:], "--model", "Qwen3-8B"), "calibrates Llama-3.1-8B, and --model is Qwen3-8B")
    refused(wager("plan", *call, "--precision", "fp8"), "--precision cannot be combined with measurements")


def test_single_steps_that_are_far_off_do_not_make_the_price_of_their_shape(wager: Call, tmp_path: Path) -> None:
    """The first step of every shape takes many times as long as the others, and a step was timed wrongly."""
    steps = [{**step, "seconds": step["seconds"] * (20 if first else 1)} for step in profile() for first in (1, 0, 0)]
    steps = [{**step, "context": step["context"] * (1 + at % 3 / 1000)} for at, step in enumerate(steps)]
    (table := tmp_path / "h100.csv").write_text(as_csv([*steps, {**steps[0], "seconds": 1e-5}, steps[1]]))
    made = wager("calibrate", "--table", str(table), "--model", "Llama-3.1-8B", "--json", str(tmp_path / "times.json"))
    assert made.code == 0, made.err
    value = json.loads((tmp_path / "times.json").read_text())
    surface = LatencySurface.from_dict(value["surface"])
    for rows, batch in ((1, 1), (32, 8), (256, 64)):
        assert surface.seconds(rows, batch, batch * 512) == pytest.approx(
            TRUTH.seconds(rows, batch, batch * 512), rel=0.03
        )
    assert value["errors"]["count"] == 45 and value["errors"]["p90"] < 0.05


BAD_TABLES = {
    "rows,context,batch,time (ms)\n1,2,1,8": "has no seconds; its columns are 'rows, context, batch, time_(ms)'.",
    "rows,context,batch,seconds\n1,2,1,": "line 2, column seconds: nothing is not a number",
    "rows,context,batch,seconds": "has 0 steps",
    "rows,context,batch,seconds\n1,64,1,0.01\n\n2,64,1,8 ms": "line 4, column seconds: '8 ms' is not a number from",
    "rows,context,batch,seconds\n1,64,1,-1": "line 2, column seconds: '-1' is not",
    "rows,context,batch,seconds\n1,nan,1,1": "line 2, column context: 'nan' is not",
    "rows,context,batch,seconds\n1,64,1.5,1": "line 2, column batch: '1.5' is not a whole number",
    "rows,context,batch,seconds\n4,64,8,1": "line 2, column rows: 4 is less than the batch of 8",
    "rows,context,batch,seconds\n1,64,1": "line 2 has 3 values for 4 columns",
    "rows,context,batch,seconds\n1,64,1,.1\n1,64,1,.1": "1 steps are too few to test a fit with",
    '[{"rows": 1, "context": 64, "batch": 1}]': "entry 1 has no seconds; its columns are 'rows, context, batch'.",
    '[{"rows": true, "context": 64, "batch": 1, "seconds": 1}]': "entry 1, column rows: 'True' is not",
    "[3]": "entry 1 is not an object",
    '{"rows": [], "context": 1, "batch": 1, "seconds": 1}': "line 1, column rows: '[]' is not a whole number",
    "[": "not JSON",
}


def test_what_is_wrong_in_a_table_is_named_by_line_and_column(wager: Call, tmp_path: Path) -> None:
    for text, words in BAD_TABLES.items():
        (table := tmp_path / f"t.{'json' if text[0] in '[{' else 'csv'}").write_text(text)
        call = ["calibrate", "--table", str(table), "--model", "Llama-3.1-8B", "--json", str(tmp_path / "out.json")]
        refused(wager(*call), words)
    refused(wager(*call, "--seconds", "3"), "--seconds has no effect with --table")
    refused(wager(*call[:3], *call[5:]), "does not say whose step times it holds")
    refused(wager("calibrate", "--append"), "--append has no effect without --url or --table")
    assert not (tmp_path / "out.json").exists()


# ---- servers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_of_wager_is_asked_for_depths_and_its_steps_make_plans(wager: Call, tmp_path: Path) -> None:
    """Its steps take 4 ms and more, so that the client, which is beside it, keeps pace with it."""

    def slowly(batch: PackedBatch) -> TargetOutput:
        time.sleep(0.004)
        return forward(batch)

    path = tmp_path / "server.json"
    with running() as server:
        target = server.llm.engine.runner.target
        forward, target.forward = target.forward, slowly  # type: ignore[method-assign]
        call = ["calibrate", "--url", server.url, "--model", "random:llama:tiny", "--json", str(path)]
        for seconds in (0.5, 5, 50):  # on a busy machine, the first may be too few for several shapes
            made = wager(*call, more=f"--seconds {seconds} --concurrency 1,2,4 --prompt-tokens 40 --depth 0,2")
            value = json.loads(path.read_text()) if made.code == 0 else {"points": []}
            shapes = [(requests, rows > requests) for rows, requests, _cached, _seconds in value["points"]]
            if {(2, False), (4, False), (4, True)} <= {*shapes}:
                break
    assert made.code == 0, made.err
    assert "beyond their rows is the time of the drafter 'served'" in " ".join(made.err.split())
    # Each without and with drafts, but what a busy machine has no time for; drafts may have less than half a token.
    assert {requests for requests, _ in shapes} == {1, 2, 4} and len(shapes) <= 6
    assert {(2, False), (4, False), (4, True)} <= {*shapes}
    for rows, requests, cached, _ in value["points"]:
        assert rows <= 3 * requests and 40 * requests < cached < 512 * requests
    plan = wager("plan", "--model", "random:llama:tiny", "--hardware", str(path), more="--batch 1,4 --json -")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["drafter"]["name"] == "served"


MODELS = response(b'{"data": [{"id": "SmolLM2-135M-Instruct", "owned_by": "vllm"}]}')


def stream(chunks: int, tokens: int, pause: float) -> list[Step]:
    """An answer of that many tokens a chunk."""
    usage = {"prompt_tokens": 40, "completion_tokens": 1 + (chunks - 1) * tokens}
    parts = [step for _ in range(chunks) for step in (pause, part(event("a")))]
    return [STREAM, *parts, part(event(finish="stop")), part(event(usage=usage)), part(DONE), LAST]


def test_the_rows_of_other_servers_steps_are_those_they_count_or_that_are_given(wager: Call, tmp_path: Path) -> None:
    """Steps of 4 ms or more, and of 10 ms where a request verifies three draft tokens, of which two are accepted."""
    path, rounds = tmp_path / "vllm.json", 0

    def metrics() -> bytes:
        counted = {"drafts": 1, "draft_tokens": 3, "accepted_tokens": 2}
        lines = [f"vllm:spec_decode_num_{name}_total {n * rounds}" for name, n in counted.items()]
        return response("\n".join([*lines, ""]).encode(), kind="text/plain")

    def script(_number: int, body: dict[str, Any]) -> list[Step]:
        nonlocal rounds
        chunks = body["max_tokens"]  # longer ones are asked for where requests did not run at once for long enough
        rounds += chunks - 1
        assert body["ignore_eos"] and body["model"] == "SmolLM2-135M-Instruct"
        return stream(chunks, 3, 0.01)

    more = "--concurrency 1,2,4 --prompt-tokens 40 --seconds 0.01"
    with scripted(lambda _number, body: stream(body["max_tokens"], 1, 0.004)) as server:
        server.pages["/v1/models"] = lambda: MODELS
        made = wager("calibrate", "--url", server.url, "--json", str(path), more=more)
    assert made.code == 0, made.err
    assert "No step with draft tokens was measured" in made.err
    assert [point[:2] for point in json.loads(path.read_text())["points"]] == [[1, 1], [2, 2], [4, 4]]
    with scripted(script) as server:
        server.pages["/v1/models"] = lambda: MODELS
        call = ["calibrate", "--url", server.url, "--append", *more.split(), "--json"]
        refused(wager(*call, str(path)), "3.00 tokens a chunk, and its /metrics count no draft tokens", code=1)
        for given in ("--depth 3", ""):
            if not given:
                server.pages["/metrics"] = metrics
            (out := tmp_path / "both.json").write_bytes(path.read_bytes())
            assert wager(*call, str(out), *given.split()).code == 0
            value = json.loads(out.read_text())
            shapes = [(rows, requests) for rows, requests, *_ in value["points"]]
            assert shapes == [(1, 1), (2, 2), (4, 4), (4, 1), (8, 2), (16, 4)]
            for (rows, requests), (*_, seconds) in zip(shapes, value["points"], strict=True):
                assert seconds > (0.0099 if rows > requests else 0.0039)
    plan = wager("plan", "--hardware", str(out), more="--batch 1 --depth 3 --json -")
    [point] = json.loads(plan.out)["points"]
    assert point["plain_s"] > 0.001
