"""`wager plan` as practitioners type it: its figures and words, models from files, and the page about it.

A right command line gives JSON without NaN and figures that hang together; a wrong one exits with 1 or 2 and one
sentence that names what is wrong.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from gguf import GGUFWriter

from economics.published import B200_CHARTS, FLAT_ATTENTION
from wager.cli import main
from wager.planner.acceptance import AcceptanceRates
from wager.planner.cost import Cluster, CostModel
from wager.planner.drafting import fractional_cost
from wager.planner.plan import Deployment
from wager.planner.report import PlanReport, token_rate

CONFIG = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
CONFIG |= {"num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 4000, "max_position_embeddings": 131072}

BOX = {"name": "box", "peaks": {"bf16": 1e14}, "bandwidth": 1e12, "memory": 2e10}


FILES: dict[str, Any] = {
    "config.json": CONFIG,
    "box.json": BOX,
    "datasheet.json": {**BOX, "bandwidth": 3350},
    "smeared.json": {**BOX, "overlap": 0.0001},
    "half.json": {**BOX, "node": 0.5},
    "trees.json": {
        "drafter": "eagle3:tree",
        "survival": [0.6, 0.3],
        "trees": True,
        "depths": [{"tau": 1.6, "lengths": [0, 1]}, {"tau": 1.8, "lengths": [0, 0, 1]}],
    },
    "tpu.json": {
        "name": "TPU v6e",
        "peaks": {"bf16": 918e12, "int8": 1836e12},
        "bandwidth": 1638e9,
        "memory": 32e9,
        "intra": 400e9,
        "node": 256,
    },
    "rates.json": {"acceptance": [0.8, 0.7, 0.6]},
    "measured.json": {"drafter": "ngram", "survival": [0.6, 0.4, 0.3, 0.2], "categories": {"qa": {"survival": [1]}}},
    "both.json": {"acceptance": [0.5], "survival": [0.5]},
    "huge.json": {"survival": [10**300]},
    "list.json": [0.5],
    "rising.json": {"survival": [0.5, 0.9]},
    "empty.json": {},
    "misspelt.json": {"survial": [0.5]},
    "remarked.json": {"survival": [0.5], "note": "of last week"},
    "scalar.json": {"acceptance": 0.5},
    "deeper.json": {"survival": [0.6, 0.4], "depth": 5},
    "faster.json": {"survival": [0.6, 0.4], "tau": 3.5},
    "shuffled.json": {"survival": [0.6], "depths": [{"depth": 2, "tau": 1.6, "lengths": [0, 1]}]},
    "skewed.json": {"popularity": [0.5] * 8 + [4 / 120] * 120},
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def wager(arguments: tuple[str, ...]) -> None:
    """The program as it is installed."""
    raise SystemExit(main(arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files above, which command lines name as @NAME."""
    folder = tmp_path_factory.mktemp("plan")
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def plan(line: str, folder: Path) -> Result:
    words = [word.replace("@", f"{folder}/") for word in shlex.split(line)]
    return CliRunner().invoke(wager, ["plan", *words])


def refuse_constant(text: str) -> float:
    raise AssertionError(f"{text} in the JSON")


def answer(line: str, folder: Path) -> dict[str, Any]:
    result = plan(f"{line} --json -", folder)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=refuse_constant)
    return found


BARE = "--model Llama-3.1-8B --hardware H100"
LLAMA = f"{BARE} --batch 8"


RIGHT = [
    "--model DeepSeek-V3 --hardware B200 --tp 4 --ep 32 --batch 16 --drafter-shape eagle:32000 --balanced",
    "--model meta-llama/Llama-3.1-8B-Instruct --hardware 'RTX 4090' --batch 1 --precision int4",
    "--model @config.json --hardware @box.json --context 0,1k,2K,131072",
    "--model Kimi-K2.6 --hardware B200 --ep 32 --context 256K --batch 1",
    "--model DeepSeek-V4-Flash --hardware B200 --context 1m --batch 1",
    f"{LLAMA} --acceptance 0,1,0.5,.75",
    f"{LLAMA} --acceptance @measured.json,0.6 --drafter-shape free",
    f"{LLAMA} --max-depth 0",
    f"{LLAMA} --depth 0",
    f"{LLAMA} --drafter-shape free",
    f"{LLAMA} --drafter-shape block:8",
    f"{LLAMA} --drafter-shape medusa:3",
    f"{LLAMA} --drafter-shape model:@config.json",
    f"{LLAMA} --drafter-cost '1.5 ms'",
    f"{LLAMA} --overhead 50us --cache fp8 --precision fp8",
    "--model Llama-3.1-70B --hardware H100 --tp 8 --drafter-shape model:Llama-3.1-8B --drafter-tp 1 --batch 1",
    "--model Qwen3-30B-A3B --hardware H100 --batch 8 --locality 0.79 --popularity @skewed.json",
    "--model gpt-oss-120b --hardware H100 --tp 8 --batch 64 --drafter-shape block:8",
    f"{LLAMA} --drafter-shape eagle3 --acceptance mtp,dflash --price 2.5",
    f"{LLAMA} --drafter-shape model:Llama-3.2-1B --output 64 --context 0,2k",
    f"{LLAMA} --drafter-shape eagle3 --tree 4 --max-depth 40 --acceptance 0.6,@rates.json",
    f"{LLAMA} --drafter-shape medusa:3 --tree 4:0.3 --max-depth 20",
    f"{LLAMA} --drafter-cost 0.05 --tree 2 --depth 12",
    "--model DeepSeek-V4-Flash --hardware B200 --tp 2 --ep 8 --drafter-shape dspark --total-batch --batch 1,8,400",
    "--model Qwen3-8B --hardware @tpu.json --batch 16 --tp 4 --drafter-shape dflash --precision int8",
    "--model @config.json --hardware @box.json --drafter-shape eagle:2000 --batch 4 --tree 3",
]


@pytest.mark.parametrize("line", RIGHT)
def test_a_right_command_line(line: str, folder: Path) -> None:
    found = answer(line, folder)
    assert found["points"]
    for point in found["points"]:
        assert point["speedup"] >= 1 or "--depth" in line
        assert 1 <= point["tokens_per_round"] <= point["depth"] + 1
        assert point["step_s"] >= point["plain_s"] * (1 - 1e-12) > 0
        assert max(point["step_s"], point["draft_s"]) <= point["round_s"] * (1 + 1e-12)
        assert point["round_s"] <= (point["step_s"] + point["draft_s"]) * (1 + 1e-12)
        assert point["price"] == pytest.approx(point["round_s"] / (point["group_batch"] * point["tokens_per_round"]))
        shared = found["hardware"]["groups"] if "--total-batch" in line else 1
        assert point["group_batch"] == pytest.approx(point["batch"] / shared)
        assert point["tokens_per_s_all"] == pytest.approx(point["tokens_per_s"] * found["hardware"]["groups"])
        assert (point["draft_s"] > 0) == (point["depth"] > 0) or found["drafter"]["name"] == "free"
        assert sum(part["share"] for part in point["parts"].values()) == pytest.approx(1)
        assert set(point["bound"]) == set(point["parts"])
    text = plan(line, folder)
    assert (text.exit_code, text.stderr) == (0, "")
    assert "speed-up" in text.stdout


WRONG = [
    ("", 2, "--hardware"),
    (f"{LLAMA} --acceptance @empty.json", 2, "gives no acceptance"),
    (f"{LLAMA} --acceptance @rising.json", 2, "rises with depth"),
    (f"{LLAMA} --acceptance @rates.json --depth 5", 2, "Depth 5 is deeper than acceptance rates is known for (3)"),
    (f"{LLAMA} --drafter-cost cheap", 2, "drafter-cost = 'cheap'"),
    (f"{LLAMA} --drafter-cost 0.1 --drafter-shape mtp", 2, "--drafter-shape and --drafter-cost"),
    (f"{LLAMA} --cache fp7", 2, "Number format 'fp7'"),
    (f"{LLAMA} --precision fp32", 2, "no known peak for fp32"),
    (f"{LLAMA} --json @none/x.json", 2, "none/x.json"),
    ("--hardware H100 --model Lama", 1, "Model 'Lama' is not known"),
    ("--hardware H100 --model ''", 2, "'--model': '' is empty"),
    ("--hardware H100 --model @nowhere.json", 1, "no file"),
    ("--hardware H100 --model @box.json", 1, "model_type"),
    ("--hardware H100 --model @list.json", 1, "JSON object"),
    ("--hardware Z900", 2, "Hardware 'Z900' is not known"),
    ("--hardware @nowhere.json", 2, "no file"),
    ("--hardware @config.json", 2, "no 'hidden_size'"),
    ("--hardware @smeared.json", 2, "overlap = 0.0001 is below 1"),
    ("--hardware @half.json", 2, "node = 0.5 is not a whole number"),
    ("--hardware @datasheet.json", 2, "bandwidth = 3350 is out of range: it is in bytes/s"),
    (f"{BARE} --batch ²", 2, "batch = '²'"),
    (f"{BARE} --batch {'9' * 400}", 2, "batch = '9999"),
    (f"{BARE} --batch 99999999", 2, "batch = 99999999"),
    (f"{BARE} --batch 1,", 2, "batch = '1,'"),
    (f"{BARE} --batch {','.join(map(str, range(1, 2002)))}", 2, "2001 batches"),
    (f"{LLAMA} --context {','.join(map(str, range(201)))}", 2, "201 contexts"),
    (f"{LLAMA} --context 129k", 2, "context = 132096"),
    (f"{LLAMA} --acceptance 0,75", 2, "acceptance = 75"),
    (f"{LLAMA} --acceptance nan", 2, "acceptance = nan"),
    (f"{LLAMA} --acceptance 75%", 2, "such as 0.75"),
    (f"{LLAMA} --acceptance eagle3", 2, "mtp, dflash"),
    (f"{LLAMA} --acceptance @both.json", 2, "gives both acceptance and survival"),
    (f"{LLAMA} --acceptance @misspelt.json", 2, "has 'survial', which no acceptance file has"),
    (f"{LLAMA} --acceptance @remarked.json", 2, "has 'note'"),
    (f"{LLAMA} --acceptance @scalar.json", 2, "acceptance in"),
    (f"{LLAMA} --acceptance @deeper.json", 2, "contradicts itself: depth is 5, and survival has 2 values"),
    (f"{LLAMA} --acceptance @faster.json", 2, "contradicts itself: tau is 3.5, with drafts of 2 tokens"),
    (f"{LLAMA} --acceptance @shuffled.json", 2, "depth 2 in the place of 1"),
    (f"{LLAMA} --acceptance @huge.json", 2, "outside 0 to 1"),
    (f"{LLAMA} --overhead 1e400s", 2, "overhead = '1e400s'"),
    (f"{LLAMA} --drafter-cost 0.1 --drafter-tp 2", 2, "--drafter-tp has no effect"),
    (f"{LLAMA} --drafter-shape eagel", 2, "drafter shape 'eagel'"),
    (f"{LLAMA} --drafter-shape eagle:200000", 2, "draft vocabulary of 200000"),
    (f"{LLAMA} --drafter-shape block:999999999", 2, "block:999999999"),
    (f"{LLAMA} --drafter-shape model:SmolLM2-135M --context 16k", 2, "more than the 8192 positions"),
    (f"{LLAMA} --drafter-shape free --drafter-tp 1", 2, "--drafter-tp has no effect"),
    (f"{LLAMA} --drafter-tp 2", 2, "drafter-tp = 2 is more than the 1"),
    (f"{LLAMA} --tp 0", 2, "error: tp = 0 is out of range"),
    (f"{LLAMA} --tp 7", 2, "tp = 7 does not divide the 32 attention heads"),
    (f"{LLAMA} --ep 2", 2, "no experts"),
    (f"{LLAMA} --export vllm --price 2", 2, "--price has no effect with --export"),
    (f"{LLAMA} --balanced", 2, "--balanced has no effect"),
    (f"{LLAMA} --dispatch fp8", 2, "--dispatch has no effect without --ep"),
    ("--model DeepSeek-V3 --hardware B200 --ep 32 --dispatch fp8:bf15", 2, "Number format 'bf15' is not known"),
    (f"{LLAMA} --link-latency 5us", 2, "--link-latency has no effect"),
    (f"{LLAMA} --locality 0.79", 2, "--locality has no effect"),
    (f"{LLAMA} --locality nan", 2, "'--locality': 'nan' is not a number"),
    ("--model Qwen3-30B-A3B --hardware H100 --popularity @rates.json", 2, "gives no popularity"),
    (f"{LLAMA} --precision bf16:mxfp4", 2, "precision = 'bf16:mxfp4'"),
    (f"{LLAMA} --depth 20 --max-depth 8", 2, "--max-depth both"),
    (f"{LLAMA} --depth 9 --drafter-shape medusa:3", 2, "Depth 9"),
    ("--model DeepSeek-V3 --hardware H200 --tp 4 --ep 6", 2, "tp = 4 does not divide ep = 6"),
    ("--model DeepSeek-V3 --hardware H200 --ep 512", 2, "ep = 512 is more than the 256 experts"),
    ("--model DeepSeek-V3 --hardware H200 --ep 16 --drafter-tp 1", 2, "no effect on mtp under --ep"),
    ("--model Llama-3.1-70B --hardware H100 --tp 8 --drafter-shape model:SmolLM2-135M", 2, "drafter: tp = 8"),
    ("--model Llama-3.1-70B --hardware @box.json --tp 2", 2, "link speed of box"),
    (f"{LLAMA} --total-batch", 2, "--total-batch has no effect"),
    (f"{LLAMA} --price 0", 2, "--price"),
    (f"{LLAMA} --output 0", 2, "--output"),
    (f"{LLAMA} --tree 1", 2, "tree = '1' is not the shape of a tree"),
    (f"{LLAMA} --tree 4:1.5", 2, "tree = '4:1.5'"),
    (f"{LLAMA} --drafter-shape dflash", 2, "No dflash head for 'Llama-3.1-8B' is known"),
    (f"{LLAMA} --drafter-shape eagle3:Qwen3-30B-A3B", 2, "reads states of 2048 elements, and the target's have 4096"),
    (f"{LLAMA} --drafter-shape eagle3:", 2, "drafter shape 'eagle3:' is not known"),
]


def test_a_wrong_command_line_is_named_in_a_sentence(folder: Path) -> None:
    for line, code, named in WRONG:
        result = plan(line, folder)
        assert isinstance(result.exception, SystemExit), line
        assert (result.exit_code, result.stdout) == (code, ""), line
        assert named in result.stderr, line
        [sentence] = [row for row in result.stderr.splitlines() if row.lower().startswith("error")]
        assert len(sentence) < 300


def test_the_deepest_depth_is_marked_in_table_notes_and_json(folder: Path) -> None:
    line = f"{BARE} --batch 1,256 --context 1k --acceptance 0.9 --drafter-shape free --max-depth 3"
    found, text = answer(line, folder), plan(line, folder).stdout
    assert [(point["depth"], point["at_max_depth"]) for point in found["points"]] == [(3, True), (3, True)]
    assert " 3+ " in text
    assert "Depth 3+ is the deepest that was tried" in " ".join(text.split())
    assert any("Depth 3+" in remark for remark in found["remarks"])
    limited = answer(f"{LLAMA} --acceptance @rates.json --drafter-shape free --max-depth 3", folder)
    assert [point["at_max_depth"] for point in limited["points"]] == [False]  # no deeper rate is known


def test_few_tokens_a_second_have_three_figures() -> None:
    assert [token_rate(rate) for rate in (0.0, 0.0423, 99.4, 1234.4)] == ["0", "0.0423", "99.4", "1,234"]


def test_figures_of_a_rank_are_said_to_be(folder: Path) -> None:
    for flags, word, groups in (("--ep 16", "rank", 16), ("--tp 4 --ep 16", "group", 4), ("--tp 8", "", 1)):
        line = f"--model DeepSeek-V3 --hardware B200 --batch 8 {flags}"
        found, text = answer(line, folder), plan(line, folder).stdout
        assert (f"tok/s/{word} " in text) == bool(word)
        assert (f"those of one {word}" in " ".join(text.split())) == bool(word)
        [point] = found["points"]
        assert point["tokens_per_s_all"] == pytest.approx(groups * point["tokens_per_s"])


def test_what_a_reader_would_not_expect_is_said(folder: Path) -> None:
    for line, said in (
        ("--model Qwen3-30B-A3B --hardware H100 --tp 8 --batch 1", "4 key-value heads over 8 devices: each keeps 1"),
        (f"{LLAMA} --drafter-shape model:SmolLM2-135M", "SmolLM2-135M has 49152 tokens, Llama-3.1-8B 128256"),
        (f"{LLAMA} --max-depth 0", "No draft depth was tried"),
    ):
        assert any(said in remark for remark in answer(line, folder)["remarks"]), said
    silent = answer("--model Llama-3.1-70B --hardware H100 --tp 8 --batch 1", folder)
    assert silent["remarks"] == []


def test_an_acceptance_file_of_the_measurement_is_read(folder: Path) -> None:
    """Its drafter is the label; survival by depth gives the rounds."""
    [point] = answer(f"{LLAMA} --acceptance @measured.json --depth 2 --drafter-shape free", folder)["points"]
    assert point["acceptance"] == "ngram"
    assert point["tokens_per_round"] == pytest.approx(1 + 0.6 + 0.4)
    (folder / "other.json").write_text(json.dumps({"drafter": "ngram", "survival": [0.9]}))
    found = answer(f"{LLAMA} --acceptance @measured.json,@other.json", folder)["points"]
    assert [point["acceptance"] for point in found] == ["ngram", f"{folder}/other.json"]
    (folder / "other.json").write_text(json.dumps({"drafter": "a\x1b[2J", "survival": [0.9]}))
    (folder / "screen.json").write_text(json.dumps({**BOX, "name": "b\x1b[2J"}))
    shown = plan("--model Llama-3.1-8B --hardware @screen.json --acceptance @other.json", folder).stdout
    assert "\x1b" not in shown and "a\\x1b[2J" in shown and "b\\x1b[2J" in shown, "they control no terminal"


# ---- the figures -----------------------------------------------------------------------------------------------------


def words_of(line: str, folder: Path) -> str:
    """What is printed, in one line."""
    return " ".join(plan(line, folder).stdout.split())


def charts(*batches: int, rates: Sequence[float] = (0.75,), depth: int | None = None) -> PlanReport:
    """The plan of the published charts."""
    cost = CostModel(FLAT_ATTENTION, Cluster(B200_CHARTS))
    acceptances = [AcceptanceRates(str(rate), rate) for rate in rates]
    deployment = Deployment(cost, fractional_cost(cost, 0.1), depth=depth)
    return PlanReport.build(deployment, batches=batches, contexts=[4096], acceptances=acceptances)


def test_where_plain_decoding_is_fastest_is_found_to_the_request() -> None:
    """Between the batches of the grid, too: with the published constants plain decoding wins from 4 to 13."""
    found = charts(1, 4096)
    assert found.as_dict()["gutter"] == [{"context": 4096, "acceptance": "0.75", "batches": [[4, 13]]}]
    assert "is fastest at batch 4 to 13" in " ".join(found.notes())


def test_the_table_explains_itself(folder: Path) -> None:
    found = charts(1, 8, 64, 4096)
    _, off, row, _ = found.table()[1]
    assert row[2:6] == ["64", "4", "1.668", "3.05"]
    assert (off[2:4], "all" in off) == (["8", "off"], True)
    flat = " ".join(" ".join([*found.summary(), *found.notes()]).split())
    assert "What plain decoding waits for at context 4096: batch 1: projections (memory)" in flat
    assert "experts (memory)" in flat
    assert "B200-charts: bf16 2.248 PFLOP/s" in flat
    assert re.search(r"one more row adds \d+% of what a row takes on average", flat)
    assert "Assumed, not measured: the acceptance 0.75 at every depth" in flat
    out = plan(LLAMA, folder).stdout
    columns = next(line.split("  ") for line in out.splitlines() if "break-even" in line and "waits for" in line)
    for column in filter(None, map(str.strip, columns)):
        assert f" {column}: " in flat.partition("Columns:")[2], column
    assert "Assumed, not measured: that there is a drafter of the shape mtp" in words_of(LLAMA, folder)
    told = words_of(f"{LLAMA} --drafter-shape free --acceptance @rates.json", folder)
    assert "Assumed, not measured: kernels as fast as the figures of the device allow." in told
    foreign = "the acceptance mtp, dflash, which was measured with Qwen3.6-35B-A3B"
    for model, assumed in (("Llama-3.1-8B", True), ("Qwen3.6-35B-A3B", False)):
        told = words_of(f"--model {model} --hardware B200 --batch 1 --acceptance mtp,dflash,@rates.json", folder)
        assert (foreign in told) == assumed


def test_what_does_not_fit_is_marked(folder: Path) -> None:
    out = words_of("--model DeepSeek-V3 --hardware H200 --batch 4", folder)
    assert "at context 4096 not even one request fits" in out
    assert "GB !" in out
    spread = answer("--model DeepSeek-V3 --hardware H200 --ep 16 --batch 4", folder)
    assert spread["hardware"]["largest_batch"]["4096"] > 100
    assert spread["points"][0]["memory"]["fits"] is True
    assert spread["points"][0]["bound"]["dispatch"] == "link"
    out = words_of("--hardware cpu --batch 1,2", folder)
    assert "memory unknown" in out
    assert "GB !" not in out


def test_a_fixed_depth_and_several_acceptances() -> None:
    low, high = charts(8, rates=(0.75, 0.9), depth=14).as_dict()["points"]
    assert (low["acceptance"], low["depth"], high["acceptance"], high["depth"]) == ("0.75", 14, "0.9", 14)
    assert low["speedup"] == low["depths"][14]["speedup"] < 1
    assert high["speedup"] == pytest.approx(1.2586, abs=5e-5)
    assert low["losing_depths"] == list(range(1, 17))


def test_a_machine_from_a_file_and_other_number_formats(folder: Path) -> None:
    line = "--model Llama-3.1-8B --hardware @fast.json --batch 1 --context 0"
    (folder / "fast.json").write_text(json.dumps({**BOX, "peaks": {"bf16": 1e14, "fp8": 2e14}}))
    wide, narrow, slow = (
        answer(f"{line} {more}", folder) for more in ("", "--precision fp8::fp8 --cache fp8", "--overhead 3ms")
    )
    assert wide["points"][0]["plain_s"] == pytest.approx(2 * narrow["points"][0]["plain_s"], rel=1e-4)
    assert narrow["model"]["precision"]["cache"] == 1
    assert slow["points"][0]["plain_s"] == pytest.approx(wide["points"][0]["plain_s"] + 3e-3)
    assert slow["points"][0]["bound"]["overhead"] == "fixed"


def test_a_tree_is_planned_with_the_levels_that_make_it_fastest(folder: Path) -> None:
    """Free rows: three levels of two children are fourteen nodes; each level costs a tenth of a step."""
    line = "--model Llama-3.1-8B --hardware @wide.json --context 0 --batch 1 --acceptance 0.5"
    (folder / "wide.json").write_text(json.dumps({**BOX, "peaks": {"bf16": 1e18}}))
    [point] = answer(f"{line} --drafter-cost 0.1 --tree 2:0.5 --max-depth 14", folder)["points"]
    by_nodes = {depth["depth"]: depth for depth in point["depths"]}
    assert [by_nodes[nodes]["tokens"] for nodes in (1, 2, 3)] == pytest.approx([1.5, 1.75, 2.0])
    for levels, nodes in ((2, 6), (3, 14)):  # of siblings at 0.5 and 0.25: 0.75 of every level
        tokens = 1 + sum(0.75**level for level in range(1, levels + 1))
        found = by_nodes[nodes]
        assert found["speedup"] >= tokens / (1 + 0.1 * levels) - 1e-3
        assert found["draft_s"] == pytest.approx(0.1 * found["levels"] * point["plain_s"])
    assert point["depth"] == 14
    [chain] = answer(f"{line} --drafter-cost 0.1", folder)["points"]
    assert point["speedup"] > chain["speedup"]
    copied = line.replace("0.5", "0.99") + " --drafter-shape free --max-depth 80"
    one, many = (answer(f"{copied} {more}", folder)["points"][0] for more in ("", "--tree 2"))
    assert one["depth"] == 80 and many["speedup"] == pytest.approx(one["speedup"]), "a chain is a tree, of any depth"
    assert "14/" in plan(f"{line} --drafter-cost 0.1 --tree 2:0.5 --max-depth 14", folder).stdout
    line = line.replace("0.5", "@trees.json")
    measured = answer(f"{line} --drafter-cost 0.1 --tree 2", folder)["points"][0]
    assert [depth["tokens"] for depth in measured["depths"]] == pytest.approx([1, 1.6, 1.8])
    nodes = "a pass of the drafter for every node of the measured trees"
    for more, said in (("", True), ("--tree 2", False)):
        assert (nodes in words_of(f"{line} --drafter-shape mtp {more}", folder)) == said


def test_a_total_batch_is_shared_by_all_ranks(folder: Path) -> None:
    line = "--model DeepSeek-V3 --hardware B200 --ep 32 --context 1k --acceptance 0.9"
    [of_a_rank], [of_all, less] = (
        answer(f"{line} --batch {batch}", folder)["points"] for batch in ("2", "64,8 --total-batch")
    )
    alike = ("depth", "speedup", "step_s", "tokens_per_s", "tokens_per_s_all", "price", "memory", "group_batch")
    assert {key: of_a_rank[key] for key in alike} == {key: of_all[key] for key in alike}
    assert (of_all["batch"], less["batch"], less["group_batch"]) == (64, 8, 0.25)
    assert less["tokens_per_s_all"] == pytest.approx(8 * less["tokens_per_s_user"])
    assert less["plain_s"] < of_all["plain_s"]
    assert less["memory"]["cache"] == of_all["memory"]["cache"] / 2, "a rank that has a request keeps all of it"
    most = answer(f"{line} --batch 8 --total-batch", folder)["hardware"]["largest_batch"]["1024"]
    full, beyond = answer(f"{line} --batch {most},{most + 1} --total-batch", folder)["points"]
    assert full["memory"]["fits"] and not beyond["memory"]["fits"]


def test_rows_are_sent_in_the_arithmetic_of_the_device(folder: Path) -> None:
    """An A100 has no fp8 and multiplies such experts as bf16; what --dispatch states counts everywhere."""
    for device, option, size in (("H200", "", 1), ("A100", "", 2), ("A100", "--dispatch fp8:bf16", 1)):
        found = answer(f"--model DeepSeek-V3 --hardware {device} --ep 16 --batch 4 {option}", folder)
        sent = found["points"][0]["parts"]["dispatch"]["bytes"] / (4 * (found["points"][0]["depth"] + 1))
        assert sent == pytest.approx((size + 2) * 58 * 8 * 7168)


def test_published_curves_by_name(folder: Path) -> None:
    """The mean tokens of rounds of eight and of fifteen draft tokens."""
    mtp, dflash = answer(f"{LLAMA} --acceptance mtp,dflash", folder)["points"]
    assert (mtp["acceptance"], mtp["depths"][8]["tokens"]) == ("mtp", pytest.approx(4.0))
    assert (dflash["acceptance"], dflash["depths"][15]["tokens"]) == ("dflash", pytest.approx(4.423))


def test_prompts_answers_and_dollars(folder: Path) -> None:
    """Llama-3.1-8B on an H100, a prompt of 8192 tokens: 2 FLOPs a weight and token, attention to half of the prompt on
    average, the head once; two dollars an hour."""
    line = "--model Llama-3.1-8B --hardware H100 --batch 16 --context 8k --drafter-shape free --output 100 --price 2"
    [point] = answer(line, folder)["points"]
    matrices = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336)
    flops = 2 * matrices * 8192 + 32 * 4 * 32 * 128 * (8192 / 2) * 8192
    prompt = flops / 989.5e12 + 2 * 128256 * 4096 / 3.35e12
    assert point["prefill"]["seconds"] == pytest.approx(prompt)
    plain, fast = 100 * point["plain_s"] / 16, 100 * point["round_s"] / point["tokens_per_round"] / 16
    assert point["prefill"]["share"] == pytest.approx(prompt / (prompt + plain))
    assert point["prefill"]["request_speedup"] == pytest.approx((prompt + plain) / (prompt + fast))
    dollars = point["dollars"]
    assert dollars["speculative"] == pytest.approx(2 / 3600 / point["tokens_per_s"] * 1e6)
    assert dollars["plain"] == pytest.approx(dollars["speculative"] * point["speedup"])
    assert dollars["with_prompts"] == pytest.approx(2 / 3600 * (prompt + fast) / 100 * 1e6)
    text = words_of(line, folder)
    assert "Prompts of 8192 tokens and answers of 100: a prompt alone takes" in text
    alone, both = (
        words_of(f"--model Llama-3.1-8B --hardware H100 --batch 1,8 --acceptance {rates}", folder)
        for rates in ("0.3", "0.9,0.3")
    )
    told = alone[alone.index("a prompt alone takes") : alone.index("Assumed")]
    assert f"answers of 512, acceptance 0.3: {told}" in both, "every figure is of the acceptance that is named"
    assert f"{dollars['plain']:,.3g} → {dollars['speculative']:,.3g}" in text
    # latent attention projects keys and values up to its 128 heads: 2 (128 + 64 + 128) FLOPs a pair and head
    latent, absorbed = (
        answer(f"--model DeepSeek-V3 --hardware B200 --tp 8 --batch 1 --context {context}", folder)["points"][0]
        for context in ("64k", "32k")
    )
    pairs = 61 * 2 * 128 * 320 / 8 / 2.25e15
    grown = latent["prefill"]["seconds"] - 2 * absorbed["prefill"]["seconds"]
    assert grown == pytest.approx(pairs * 65536**2 / 4, rel=0.02)
    eight = answer(f"{line} --tp 8", folder)["points"][0]["dollars"]
    assert eight["speculative"] > dollars["speculative"]


def test_intensities_are_in_the_json(folder: Path) -> None:
    found = answer("--model DeepSeek-V4-Flash --hardware B200 --batch 4 --context 100k", folder)
    for part in found["points"][0]["parts"].values():
        assert part["intensity"] == pytest.approx(part["flops"] / part["bytes"] if part["bytes"] else 0)


# ---- files of models -------------------------------------------------------------------------------------------------

TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 500, "max_position_embeddings": 512}


def test_a_directory_and_a_gguf_file_are_planned_by_their_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    line = f"--hardware H100 --batch 1 --model {tmp_path}"
    assert answer(line, tmp_path)["points"][0]["context"] == 512  # all it was made for
    found = answer(f"{line} --context 100", tmp_path)
    assert (found["model"]["name"], found["model"]["layers"]) == (tmp_path.name, 2)
    matrices = 2 * (64 * 16 * 12 + 3 * 64 * 128) + 2 * 500 * 64
    assert found["model"]["parameters"] == matrices + 5 * 64

    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 2, "head_count": 4, "head_count_kv": 2}
    for name, value in {**sizes, "feed_forward_length": 128, "vocab_size": 500}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("output.weight", np.zeros((500, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = answer(f"{line}/tiny.gguf --context 100", tmp_path)
    assert stored["model"]["parameters"] == found["model"]["parameters"]
    assert stored["points"][0]["step_s"] == pytest.approx(found["points"][0]["step_s"])


@pytest.mark.parametrize(
    ("name", "stored", "formats"),
    [
        (
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
            },
            ("fp8", "bf16", 1.0),
        ),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, ("int4", "bf16", 2.0)),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}, ("int4", "bf16", 2.0)),
    ],
)
def test_a_quantisation_beside_the_configuration(
    tmp_path: Path, name: str, stored: dict[str, Any], formats: tuple[str, str, float]
) -> None:
    """Older checkpoints state it in a file of its own; the config.json's own takes precedence."""

    def found(path: Path) -> tuple[str, str, float]:
        precision = answer(f"--model {path} --hardware H100 --context 100 --batch 1", tmp_path)["model"]["precision"]
        return precision["weights"]["name"], precision["head"]["name"], precision["cache"]

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / name).write_text(json.dumps(stored))
    assert found(tmp_path) == found(tmp_path / "config.json") == formats
    own = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **own}))
    assert found(tmp_path)[::2] == ("fp8", 2.0)


# ---- the page about it -----------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "economics.md").read_text(encoding="utf-8")


def documented(kind: str, found: dict[str, Any]) -> list[str]:
    """Fields that only one of docs/economics.md and the JSON has for a part of the JSON."""
    [block] = re.findall(rf'"{kind}":\s+\[?\{{(.*?)\}}\]?,\n "', PAGE, re.DOTALL)
    nested = re.sub(r"\{.*?\}", "", re.sub(r"\{[^{}]*\{[^{}]*\}[^{}]*\}", "", block))
    return sorted(
        set(re.findall(r'"(\w+)"', re.sub(r'"(?:memory|compute|both|link|fixed)" ?\|', "", nested))) ^ set(found)
    )


def test_the_page_lists_the_fields_of_the_json(folder: Path) -> None:
    found = answer(LLAMA, folder)
    assert documented("model", found["model"]) == []
    assert documented("hardware", found["hardware"]) == []
    assert documented("points", found["points"][0]) == []


@pytest.mark.parametrize(
    ("label", "line"),
    [
        ("the full model, locality 0.79", "--model DeepSeek-V4-Flash --hardware B200 --locality 0.79"),
        ("the full model", "--model DeepSeek-V4-Flash --hardware B200"),
    ],
)
def test_the_pages_table_is_what_plan_says(label: str, line: str, folder: Path) -> None:
    [row] = [row for row in PAGE.splitlines() if row.startswith(f"| {label} | ")]
    found = answer(f"{line} --drafter-cost 0.1 --batch 1,2,4,8,16,32,64,256,1024", folder)["points"]
    said = [f"{point['depth']} · {point['speedup']:.3f}" if point["depth"] else "off" for point in found]
    assert said == [cell.strip() for cell in row.split("|")[2:-1]]


@pytest.mark.parametrize(
    ("label", "line"),
    [
        ("`mtp`", "--model Qwen3.6-35B-A3B --hardware B200 --acceptance mtp --context 1k --max-depth 8"),
        ("`0.775`", "--model Qwen3.6-35B-A3B --hardware B200 --acceptance 0.775 --context 1k --max-depth 8"),
        ("`0.779`", "--model Qwen3.6-35B-A3B --hardware B200 --acceptance 0.779 --context 1k --max-depth 8"),
    ],
)
def test_the_table_of_curves_is_what_plan_says(label: str, line: str, folder: Path) -> None:
    [row] = [row for row in PAGE.splitlines() if row.startswith(f"| {label} | 1 · ")]
    found = answer(f"{line} --batch 1,4,16,64,256", folder)["points"]
    assert [f"{p['depth']} · {p['speedup']:.3f}" for p in found] == [cell.strip() for cell in row.split("|")[2:-1]]


@pytest.mark.slow
def test_the_table_of_trees_is_what_plan_says(folder: Path) -> None:
    table = PAGE.partition("| batch | chain | tree of 4 children |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    line = "--model Llama-3.1-8B --hardware H100 --drafter-shape eagle3 --batch 1,8,64"
    chains, trees = (answer(f"{line} {more}", folder)["points"] for more in ("", "--tree 4 --max-depth 64"))
    for (batch, chain, tree), plain, grown in zip(rows, chains, trees, strict=True):
        levels = next(each["levels"] for each in grown["depths"] if each["depth"] == grown["depth"])
        assert int(batch) == plain["batch"]
        assert (chain, tree) == (
            f"{plain['depth']} · {plain['speedup']:.3f}",
            f"{grown['depth']}/{levels} · {grown['speedup']:.3f}",
        )
