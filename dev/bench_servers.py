"""Servers side by side under load, by one client: throughput, TTFT and ITL against the number of users.

    python dev/bench_servers.py --output OUT [--prompts FILE] [--users 1,2,4,8,16,32] [--rounds 2] [--tokens 64]
                                [--servers wager,vllm,llama.cpp] [--server NAME=COMMAND ...]

A file of prompts is shuffled, always alike, since files are often sorted by kind and each point would have its own.

All servers are started first, each in a process group of its own; while one is measured the others are stopped
(SIGSTOP), so that no idle thread of theirs takes time. Every point is one run of `wager bench --url`; servers take
turns at each number of users, and another one begins each time. All get the same prompts at a point, and never one
twice.
Writes OUT/servers.json, OUT/servers.svg, each run's own JSON and each server's log.

vLLM's CPU server and llama.cpp's are those of ~/.cache/wager-peers ($WAGER_PEERS), each on SmolLM2-135M-Instruct in
the form that it computes best: Q4_1 for wager and llama.cpp, bfloat16 for vLLM, which does not read Q4_1 on a CPU.
vLLM leaves one core to its scheduler; as vllm-all-cores it computes on that one too.
COMMAND may be any other server; {port} in it is the port.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from wager.bench.load import distinct
from wager.prompts import BUILTIN, read_prompts

ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("WAGER_PEERS", "~/.cache/wager-peers")).expanduser()
READY_S = 400.0
"""The longest that a server may take to start: vLLM compiles."""
COLOURS, MARKERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"), "os^DvPX"
"""Of the servers' lines; the colours are told apart with any colour vision."""

LLAMA_SERVER = """
import sys, threading, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, p.n_parallel, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
p.n_ctx, p.kv_unified, p.use_jinja, p.warmup = 2048 * max(4, p.n_parallel), True, True, True
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
if len(sys.argv) > 5:
    p.speculative.types = [getattr(x.common_speculative_type, "COMMON_SPECULATIVE_TYPE_" + sys.argv[5])]
server = x.Server(p)
print(server.listening_address, flush=True)
threading.Event().wait()
"""
"""llama.cpp's own HTTP server, as xllamacpp starts it: PATH PORT SLOTS THREADS [SPECULATION]."""

FIGURES = {
    "output_tok_s": "tokens/s",
    "ttft_s.p50": "TTFT, median",
    "ttft_s.p90": "TTFT, 90th percentile",
    "tpot_s.mean": "TPOT, mean",
    "itl_s.p50": "between chunks, median",
    "itl_s.p99": "between chunks, 99th percentile",
}
"""What is compared, by its place in a summary."""


def known_servers(most_users: int) -> dict[str, list[str]]:
    """The commands of servers by name; {port} is filled in later."""
    cores = str(_cores())
    gguf, directory = str(PEERS / "models" / "smollm2-q4_1.gguf"), str(PEERS / "models" / "smollm2-bf16")
    llama = [str(PEERS / "llama/bin/python"), "-c", LLAMA_SERVER, gguf, "{port}", str(most_users), cores]
    vllm = [
        str(PEERS / "vllm/bin/python"),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        directory,
        "--served-model-name",
        "SmolLM2-135M-Instruct",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        str(most_users),
    ]
    lookup = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    wager = [sys.executable, "-m", "wager.cli", "serve", "--port", "{port}", "--model", gguf]
    return {
        "wager": wager,
        "wager-plain": [*wager, "--drafter", "none"],
        "llama.cpp": llama,
        "llama.cpp-ngram": [*llama, "NGRAM_MOD"],
        "vllm": vllm,
        "vllm-all-cores": ["env", f"VLLM_CPU_OMP_THREADS_BIND=0-{(os.cpu_count() or 1) - 1}", *vllm],
        "vllm-ngram": [*vllm, "--speculative-config", json.dumps(lookup)],
    }


def _cores() -> int:
    from wager.kernels.cpu import physical_cores

    return physical_cores()


@dataclass
class RunningServer:
    """A server's process group and its port."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    port: int

    @classmethod
    def start(cls, name: str, command: Sequence[str], folder: Path) -> RunningServer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        filled = [word.replace("{port}", str(port)) for word in command]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src") if name.startswith("wager") else "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        }
        log = (folder / f"{name}.log").open("wb")
        process = subprocess.Popen(filled, stdout=log, stderr=log, env=environment, start_new_session=True)
        return cls(name, filled, process, port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self, key: str = "") -> None:
        """Until it lists its models, to who has that key."""
        deadline = time.monotonic() + READY_S
        models = urllib.request.Request(
            f"{self.url}/v1/models", headers={"authorization": f"Bearer {key}"} if key else {}
        )
        while True:
            try:
                with urllib.request.urlopen(models, timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} did not start: see its log.") from None
                time.sleep(0.2)

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            raise SystemExit(f"{self.name} has ended: see its log.") from None

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


def main() -> None:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end with it, stopped ones too
    options.output.mkdir(parents=True, exist_ok=True)
    options.prompts = read_prompts(options.prompts or BUILTIN)
    random.Random(0).shuffle(options.prompts)
    commands = chosen_servers(options)
    servers: list[RunningServer] = []
    try:
        for name, command in commands.items():  # one after the other: each has the machine for itself while it starts
            server = RunningServer.start(name, command, options.output)
            servers.append(server)
            server.wait_until_ready()
            warm_up(server, options)
            server.signal(signal.SIGSTOP)
        points = measure(servers, options)
    finally:
        for server in servers:
            server.end()
    result = {
        "servers": {server.name: shlex.join(server.command) for server in servers},
        "options": {key: str(value) for key, value in vars(options).items() if key != "prompts"},
        "card": points[0].pop("card"),
        "points": [{key: value for key, value in point.items() if key != "card"} for point in points],
        "medians": medians(points),
    }
    (options.output / "servers.json").write_text(json.dumps(result, indent=1))
    show(result["medians"], list(commands))
    late = sum(point["summary"]["client"]["late"] for point in points)
    print(f"\nThe client itself was busy or late in {late} of {len(points)} points.")
    draw(result["medians"], options.output / "servers.svg")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--users", default="1,2,4,8,16,32", help="numbers of users")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--requests", type=int, default=8, help="fewest of a point; twice the users, if that is more")
    parser.add_argument("--servers", default="wager,vllm,llama.cpp")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--body", default='{"temperature": 0}', help="fields of every request, as JSON")
    options = parser.parse_args()
    options.users = [int(number) for number in options.users.split(",")]
    return options


def chosen_servers(options: argparse.Namespace) -> dict[str, list[str]]:
    known = known_servers(max(options.users))
    named = [name for name in options.servers.split(",") if name]
    unknown = [name for name in named if name not in known]
    if unknown:
        raise SystemExit(f"There is no server {unknown[0]!r}. Known: {', '.join(known)}.")
    given = dict(text.split("=", 1) for text in options.server)
    return {name: known[name] for name in named} | {name: shlex.split(text) for name, text in given.items()}


def warm_up(server: RunningServer, options: argparse.Namespace) -> None:
    """Some requests of every number of users: compilers, caches and schedulers see each batch once."""
    for users in options.users:
        client(server, users, users, 10_000_000, options, options.output / "warm-up.json", tokens=8)


def measure(servers: Sequence[RunningServer], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One point for each round, number of users and server."""
    points: list[dict[str, Any]] = []
    first = turn = 0
    for number in range(options.rounds):
        for users in options.users:
            requests = max(options.requests, 2 * users)
            for server in [*servers[turn % len(servers) :], *servers[: turn % len(servers)]]:
                path = options.output / f"{server.name}-{users}-{number}.json"
                server.signal(signal.SIGCONT)
                result = client(server, users, requests, first, options, path, tokens=options.tokens)
                server.signal(signal.SIGSTOP)
                point = {"server": server.name, "users": users, "round": number, "first": first}
                points.append({**point, "summary": result["summary"], "card": result["card"]})
                found = figures(result["summary"])
                print(f"round {number}, {users:2} users, {server.name:12}", *[f"{v:9.4g}" for v in found.values()])
            first += requests
            turn += 1
    return points


def client(
    server: RunningServer,
    users: int,
    requests: int,
    first: int,
    options: argparse.Namespace,
    path: Path,
    *,
    tokens: int,
) -> dict[str, Any]:
    """One run of `wager bench --url` on prompts of its own; its result."""
    prompts = path.with_suffix(".prompts")
    chosen = [distinct(options.prompts, number) for number in range(first, first + requests)]
    rows = [{"id": number, "category": each.category, "prompt": each.text} for number, each in enumerate(chosen)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "wager.cli", "bench", str(prompts), "--url", server.url, "--json", str(path)]
    command += ["--concurrency", str(users), "--max-tokens", str(tokens), "--body", options.body]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{server.name}, {users} users: {done.stderr}")
    result: dict[str, Any] = json.loads(path.read_text())
    if result["summary"]["failed"]:
        print(f"{server.name}, {users} users: failed {result['summary']['failed']}")
    return result


def figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """Those of FIGURES; not a number where nothing was measured."""
    found = {}
    for name in FIGURES:
        part, _, key = name.partition(".")
        value = summary[part][key] if key else summary[part]
        found[name] = float("nan") if value is None else float(value)
    return found


def medians(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Server -> number of users -> figure, the median over the rounds."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for server in dict.fromkeys(point["server"] for point in points):
        for users in dict.fromkeys(point["users"] for point in points):
            mine = [figures(p["summary"]) for p in points if (p["server"], p["users"]) == (server, users)]
            middle = {name: median(each[name] for each in mine) for name in FIGURES}
            found.setdefault(server, {})[str(users)] = middle
    return found


def show(middle: Mapping[str, Mapping[str, Mapping[str, float]]], names: Sequence[str]) -> None:
    """A table; where there are others, its last line is how much better the first server is than the best of them."""
    for name, label in FIGURES.items():
        rate = name.endswith("tok_s")
        print(f"\n{label}{'' if rate else ', ms'}")
        users = list(middle[names[0]])
        print(f"{'users':14}", *[f"{count:>9}" for count in users])
        for server in names:
            values = [middle[server][count][name] * (1 if rate else 1e3) for count in users]
            print(f"{server:14}", *[f"{value:9.1f}" for value in values])
        if len(names) > 1:
            best = [(max if rate else min)(middle[server][count][name] for server in names[1:]) for count in users]
            ratios = [middle[names[0]][count][name] / value for count, value in zip(users, best, strict=True)]
            print(f"{names[0] + ' ×':14}", *[f"{ratio if rate else 1 / ratio:9.2f}" for ratio in ratios])


def draw(middle: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Throughput, TTFT, ITL by token and by chunk against the number of users."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    figure.suptitle("The same requests to each server")
    parts: Sequence[tuple[str, str, tuple[str, ...], str]] = (
        ("Throughput", "tokens/s", ("output_tok_s",), "upper left"),
        ("Time to the first token: median, 90th percentile (thin)", "ms", ("ttft_s.p50", "ttft_s.p90"), "upper left"),
        ("Time of a token (mean)", "ms", ("tpot_s.mean",), "upper left"),
        ("Between chunks: median, 99th percentile (thin)", "ms", ("itl_s.p50", "itl_s.p99"), "upper left"),
    )
    for axes, (title, unit, names, place) in zip(figure.subplots(2, 2).flat, parts, strict=True):
        for number, (server, points) in enumerate(middle.items()):
            users = [int(count) for count in points]
            for thin, name in enumerate(names):
                scale = 1e3 if unit == "ms" else 1.0
                axes.plot(
                    users,
                    [scale * points[str(count)][name] for count in users],
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                    markersize=3 if thin else 5,
                    linewidth=0.8 if thin else 1.8,
                    linestyle="--" if thin else "-",
                    label=None if thin else server,
                )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        if unit == "ms":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        axes.legend(loc=place, fontsize=8)
        axes.set(title=title, xlabel="users", ylabel=unit)
        axes.grid(color="0.9")
    figure.savefig(path)


if __name__ == "__main__":
    main()
