"""`wager plan` end to end: the table, its words, JSON, and invalid arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from wager.cli import main

Run = Callable[..., tuple[int, str, str]]


CHARTS = ["--model", "DeepSeek-V4-Flash-charts", "--hardware", "B200-charts", "--drafter-cost", "0.1"]


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["plan", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def answer(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json", "-")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_json_of_the_design(run: Run) -> None:
    found = answer(run, *CHARTS, "--batch", "1,8,64", "--context", "4096,32768")
    chosen = [(p["context"], p["batch"], p["depth"], round(p["speedup"], 3)) for p in found["points"]]
    assert chosen == [
        (4096, 1, 1, 1.171),
        (4096, 8, 0, 1.0),
        (4096, 64, 4, 1.668),
        (32768, 1, 1, 1.152),
        (32768, 8, 0, 1.0),
        (32768, 64, 2, 1.246),
    ]
    for point in found["points"]:
        seconds = point["step_s"] + point["draft_s"]
        assert point["price"] == pytest.approx(seconds / (point["batch"] * point["tokens_per_round"]))
        assert point["tokens_per_s_user"] == pytest.approx(point["tokens_per_round"] / seconds)
        assert sum(part["share"] for part in point["parts"].values()) == pytest.approx(1)
        assert set(point["bound"]) == set(point["parts"])
        assert set(point["bound"].values()) <= {"memory", "compute", "both", "link", "fixed"}
    assert found["points"][0]["bound"]["experts"] == "memory"
    assert found["model"]["name"] == "DeepSeek-V4-Flash-charts"
    assert found["hardware"]["ridge"]["bf16"] == pytest.approx(281)


def test_where_plain_decoding_is_fastest_is_found_to_the_request(run: Run) -> None:
    """Between the batches of the grid, too: with the published constants plain decoding wins from 4 to 13."""
    found = answer(run, *CHARTS, "--batch", "1,4096")
    assert found["gutter"] == [{"context": 4096, "acceptance": "0.75", "batches": [[4, 13]]}]
    assert "is fastest at batch 4 to 13" in run(*CHARTS, "--batch", "1,4096")[1]


def test_the_table_explains_itself(run: Run) -> None:
    code, out, err = run(*CHARTS, "--batch", "1,8,64,4096")
    assert (code, err) == (0, "")
    [row] = [line for line in out.splitlines() if re.match(r" 4096\s+0\.75\s+64\s", line)]
    assert row.split()[3:6] == ["4", "1.668", "3.05"]
    [off] = [line for line in out.splitlines() if re.match(r" 4096\s+0\.75\s+8\s", line)]
    assert off.split()[3] == "off"
    assert "all" in off.split()
    flat = " ".join(out.split())
    assert "What plain decoding waits for at context 4096: batch 1: projections (memory)" in flat
    assert "experts (memory)" in flat
    assert "B200-charts: bf16 2.248 PFLOP/s" in flat
    assert re.search(r"one more row adds \d+% of what a row takes on average", flat)
    assert "Assumed, not measured: the acceptance 0.75 at every depth" in flat
    columns = next(line.split("  ") for line in out.splitlines() if "break-even" in line and "waits for" in line)
    for column in filter(None, map(str.strip, columns)):
        assert f" {column}: " in flat.partition("Columns:")[2], column


def test_a_drafter_that_is_assumed_is_said_to_be(run: Run, tmp_path: Path) -> None:
    line = ("--model", "Llama-3.1-8B", "--hardware", "H100", "--batch", "1")
    assert "Assumed, not measured: that there is a drafter of the shape mtp" in " ".join(run(*line)[1].split())
    (rates := tmp_path / "measured.json").write_text('{"acceptance": [0.6, 0.5]}')
    told = " ".join(run(*line, "--drafter-shape", "free", "--acceptance", str(rates))[1].split())
    assert "Assumed, not measured: kernels as fast as the figures of the device allow." in told


def test_what_does_not_fit_is_marked(run: Run) -> None:
    code, out, _ = run("--model", "DeepSeek-V3", "--hardware", "H200", "--batch", "4")
    assert code == 0
    assert "at context 4096 not even one request fits" in out
    assert "GB !" in out
    spread = answer(run, "--model", "DeepSeek-V3", "--hardware", "H200", "--ep", "16", "--batch", "4")
    assert spread["hardware"]["largest_batch"]["4096"] > 100
    assert spread["points"][0]["memory"]["fits"] is True
    assert spread["points"][0]["bound"]["dispatch"] == "link"
    out = run("--hardware", "cpu", "--batch", "1,2")[1]
    assert "memory unknown" in out
    assert "GB !" not in out


def test_a_fixed_depth_and_several_acceptances(run: Run) -> None:
    found = answer(run, *CHARTS, "--batch", "8", "--acceptance", "0.75,0.9", "--depth", "14")
    low, high = found["points"]
    assert (low["acceptance"], low["depth"], high["acceptance"], high["depth"]) == ("0.75", 14, "0.9", 14)
    assert low["speedup"] == low["depths"][14]["speedup"] < 1
    assert high["speedup"] == pytest.approx(1.2586, abs=5e-5)
    assert low["losing_depths"] == list(range(1, 17))


def test_a_directory_and_a_gguf_file_are_planned_by_their_shape(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = answer(run, "--model", str(folder), "--hardware", "H100", "--batch", "1")
    assert found["points"][0]["context"] == 512  # all it was made for
    found = answer(run, "--model", str(folder), "--hardware", "H100", "--context", "100", "--batch", "1")
    assert (found["model"]["name"], found["model"]["layers"]) == ("tiny", 2)
    matrices = 2 * (64 * 16 * 12 + 3 * 64 * 128) + 2 * 500 * 64
    assert found["model"]["parameters"] == matrices + 5 * 64

    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 2, "head_count": 4, "head_count_kv": 2}
    for name, value in {**sizes, "feed_forward_length": 128, "vocab_size": 500}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("output.weight", np.zeros((500, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = answer(run, "--model", str(path), "--hardware", "H100", "--context", "100", "--batch", "1")
    assert stored["model"]["parameters"] == found["model"]["parameters"]
    assert stored["points"][0]["step_s"] == pytest.approx(found["points"][0]["step_s"])


def test_a_machine_from_a_file_and_other_number_formats(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    path.write_text(
        json.dumps({"name": "box", "peaks": {"bf16": 1e14, "fp8": 2e14}, "bandwidth": 1e12, "memory": 2e10})
    )
    base = ["--model", "Llama-3.1-8B", "--hardware", str(path), "--batch", "1", "--context", "0"]
    wide, narrow = answer(run, *base), answer(run, *base, "--precision", "fp8::fp8", "--cache", "fp8")
    assert wide["points"][0]["plain_s"] == pytest.approx(2 * narrow["points"][0]["plain_s"], rel=1e-4)
    assert narrow["model"]["precision"]["cache"] == 1
    slow = answer(run, *base, "--overhead", "3ms")
    assert slow["points"][0]["plain_s"] == pytest.approx(wide["points"][0]["plain_s"] + 3e-3)
    assert slow["points"][0]["bound"]["overhead"] == "fixed"


@pytest.mark.parametrize(
    ("content", "message"),
    [({**CONFIG, "model_type": "gpt2"}, "gpt2"), ({"model_type": "llama"}, "'num_hidden_layers'"), ([], "JSON object")],
)
def test_a_configuration_that_says_too_little(run: Run, tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    code, _, err = run("--model", str(tmp_path), "--hardware", "H100")
    assert code == 1
    assert message in err


# ---- the page about it --------------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "economics.md").read_text(encoding="utf-8")


def documented(kind: str, found: dict[str, Any]) -> list[str]:
    """Fields that only one of docs/economics.md and the JSON has for a part of the JSON."""
    [block] = re.findall(rf'"{kind}":\s+\[?\{{(.*?)\}}\]?,\n "', PAGE, re.DOTALL)
    nested = re.sub(r"\{.*?\}", "", re.sub(r"\{[^{}]*\{[^{}]*\}[^{}]*\}", "", block))
    return sorted(
        set(re.findall(r'"(\w+)"', re.sub(r'"(?:memory|compute|both|link|fixed)" ?\|', "", nested))) ^ set(found)
    )


def test_the_page_lists_the_fields_of_the_json(run: Run) -> None:
    found = answer(run, *CHARTS, "--batch", "1")
    assert documented("model", found["model"]) == []
    assert documented("hardware", found["hardware"]) == []
    assert documented("points", found["points"][0]) == []


@pytest.mark.parametrize(
    ("label", "model", "hardware", "locality"),
    [
        ("the full model, locality 0.79", "DeepSeek-V4-Flash", "B200", "0.79"),
        ("as published", "DeepSeek-V4-Flash-charts", "B200-charts", "1"),
        ("real layers", "DeepSeek-V4-Flash-mix", "B200-charts", "1"),
        ("the full model", "DeepSeek-V4-Flash", "B200", "1"),
    ],
)
def test_the_pages_table_is_what_plan_says(run: Run, label: str, model: str, hardware: str, locality: str) -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {label} | ")]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    line = ["--model", model, "--hardware", hardware, "--locality", locality, "--drafter-cost", "0.1"]
    found = answer(run, *line, "--batch", "1,2,4,8,16,32,64,256,1024")["points"]
    said = [f"{point['depth']} · {point['speedup']:.3f}" if point["depth"] else "off" for point in found]
    assert said == cells


def test_a_head_left_in_16_bits_makes_drafting_dearer(run: Run) -> None:
    """Llama-3.1-8B in AWQ: depth 5 and 2.23 times (2.26 before the drafter read its own cache) if the head had 4 bits;
    it has 16, and the drafter reads it too."""
    line = ["--model", "Llama-3.1-8B", "--hardware", "H200", "--batch", "1", "--precision"]
    [found], [narrow] = (answer(run, *line, precision)["points"] for precision in ("awq", "awq::awq"))
    assert (narrow["depth"], round(narrow["speedup"], 2)) == (5, 2.23)
    assert (found["depth"], round(found["speedup"], 2)) == (3, 1.63)


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
    run: Run, tmp_path: Path, name: str, stored: dict[str, Any], formats: tuple[str, str, float]
) -> None:
    """Older checkpoints state it in a file of its own; the config.json's own takes precedence."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text(json.dumps(stored))
    flags = ("--hardware", "H100", "--context", "100", "--batch", "1")
    for path in (tmp_path, tmp_path / "config.json"):
        found = answer(run, "--model", str(path), *flags)["model"]["precision"]
        assert (found["weights"]["name"], found["head"]["name"], found["cache"]) == formats
    own = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **own}))
    found = answer(run, "--model", str(tmp_path), *flags)["model"]["precision"]
    assert (found["weights"]["name"], found["cache"]) == ("fp8", 2.0)
