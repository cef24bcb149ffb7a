"""`wager bench --url` as a command: what it measures, writes, draws, compares and refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from load_servers import STREAM, WHOLE, Application, Step, response, scripted, serving

import wager as package
from in_process import Call


@pytest.fixture(scope="module")
def toy() -> Iterator[str]:
    with serving(Application(tokens=6, first=0.02, gap=0.005, at_once=2)) as at:
        yield f"http://{at}"


def refused(result: Any, *words: str) -> None:
    assert result.code in (1, 2) and result.out == "", result.err
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


def test_a_server_is_measured(wager: Call, toy: str, tmp_path: Path) -> None:
    path, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    done = wager(
        "bench",
        "--url",
        toy,
        "--concurrency",
        "2",
        "--limit",
        "6",
        "--max-tokens",
        "6",
        "--slo",
        "ttft:10s,itl:10s",
        "--json",
        str(path),
        "--plot",
        str(plot),
    )
    assert done.code == 0, done.err
    assert "TTFT" in done.out and "6 of 6 requests answered" in done.out and "100.0 % kept the SLO" in done.out
    assert "--chunk-usage" in done.out, "the tokens of chunks are estimated"
    result = json.loads(path.read_text())
    card, summary = result["card"], result["summary"]
    assert (card["kind"], card["model"], card["url"], card["prompts"]) == ("load", "toy", f"{toy}/v1", 6)
    assert card["server"] == {"header": "uvicorn", "owned_by": "tests"}
    assert card["settings"]["concurrency"] == 2 and card["settings"]["max_tokens"] == 6
    assert (summary["ok"], summary["tokens"], summary["chunks"]) == (6, 36, 18)
    assert summary["ttft_s"]["p50"] >= 0.02 and summary["goodput"]["requests"] == 6
    assert [row["number"] for row in result["rows"]] == list(range(6))
    assert {row["text"] for row in result["rows"]} == {"xxxxxx"}
    assert plot.read_text().startswith("<?xml")


def test_results_are_compared(wager: Call, toy: str, tmp_path: Path) -> None:
    path, plot = tmp_path / "result.json", tmp_path / "plot.png"
    common = ("bench", "--url", toy, "--limit", "3", "--max-tokens", "6", "--model", "any", "--chunk-usage")
    assert wager(*common, "--json", str(path)).code == 0
    again = wager(*common, "--rate", "50", "--compare-with", str(path), "--plot", str(plot), "--json", "-")
    assert again.code == 0, again.err
    found = json.loads(again.out)
    assert found["compare"]["texts"] == found["compare"]["same_text"] == 3
    assert found["compare"]["settings"].keys() == {"rate", "concurrency"}
    assert found["card"]["settings"]["concurrency"] == 4096 and found["card"]["model"] == "any"
    assert "Against any" in again.err and plot.stat().st_size > 10_000


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with the openssl command")
def test_a_server_over_https_is_measured(wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ],
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    with serving(Application(tokens=2), ssl_keyfile=str(key), ssl_certfile=str(certificate)) as at:
        url = f"https://localhost:{at.rpartition(':')[2]}"
        refused(wager("bench", "--url", url, "--limit", "1"), "certificate")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ssl.get_default_verify_paths().cafile == str(certificate)
        done = wager("bench", "--url", url, "--limit", "2", "--max-tokens", "2")
    assert done.code == 0 and "2 of 2 requests answered" in done.out, done.err


def test_the_key_is_read_and_never_shown(wager: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret-key\n")
    monkeypatch.delenv("WAGER_API_KEY", raising=False)
    with serving(Application(tokens=1, key="s3cret-key")) as at:
        common = ("bench", "--url", f"http://{at}", "--limit", "1", "--json", "-")
        refused(wager(*common), "401", "WAGER_API_KEY")
        with_file = wager(*common, "--api-key-file", str(path))
        monkeypatch.setenv("WAGER_API_KEY", "s3cret-key")
        with_variable = wager(*common)
    for done in (with_file, with_variable):
        assert done.code == 0, done.err
        assert "s3cret" not in done.out + done.err
    path.write_text("two words")
    refused(wager(*common, "--api-key-file", str(path)), str(path), "key")
    monkeypatch.setenv("WAGER_API_KEY", "a\r\nX-Evil: b")
    refused(wager(*common), "WAGER_API_KEY")


def test_failures_are_shown_and_a_run_of_nothing_else_fails(wager: Call) -> None:
    full = response(b'{"error": {"message": "the queue is full"}}', status="429 Full", more="Retry-After: 0\r\n")
    warm_up = 1 + 2
    with scripted(lambda number, _body: [full] if number == warm_up else WHOLE) as server:
        done = wager("bench", "--url", server.url, "--warm-up", "2", "--limit", "4", "--json", "-")
    assert done.code == 0
    assert json.loads(done.out)["summary"]["failed"] == {"refused": 1}
    assert "1 failed (refused): status 429: the queue is full" in done.err
    with scripted(lambda number, _body: [full] if number >= warm_up else WHOLE) as server:
        done = wager("bench", "--url", server.url, "--warm-up", "2", "--limit", "4", "--json", "-")
    assert done.code == 1 and "No request was answered: status 429" in done.err
    assert json.loads(done.out)["summary"]["ok"] == 0


def test_fields_are_added_and_removed(wager: Call) -> None:
    with scripted(WHOLE) as server:
        fields = '{"max_tokens": null, "max_completion_tokens": 3, "speculation": {"depth": 2}}'
        done = wager(
            "bench",
            "--url",
            server.url,
            "--limit",
            "1",
            "--body",
            fields,
            "--top-k",
            "5",
            "--raw",
            "--temperature",
            "1",
            "--seed",
            "7",
        )
    assert done.code == 0, done.err
    [last] = server.bodies[-1:]
    assert last.pop("prompt")
    assert last == {
        "model": "scripted",
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 7,
        "top_k": 5,
        "max_completion_tokens": 3,
        "speculation": {"depth": 2},
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_in_order(number: int, code: int) -> None:
    asked = threading.Event()

    def silent(_number: int, _body: dict[str, Any]) -> list[Step]:
        asked.set()
        return [STREAM, 60.0]

    with scripted(silent) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "wager.cli", "bench", "--url", server.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])},
        )
        assert asked.wait(60)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in err


def test_a_burst_of_more_requests_than_files_may_be_open(tmp_path: Path) -> None:
    """The limit is raised for it; every request is answered."""
    path = tmp_path / "result.json"
    arguments = ["--rate", "5000", "--requests", "300", "--max-tokens", "1", "--warm-up", "1", "--json", str(path)]
    script = (
        "import resource, sys; from wager.cli import main; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard)); sys.exit(main(sys.argv[1:]))"
    )
    application = Application(tokens=1, first=1.5)
    with serving(application) as at:
        done = subprocess.run(
            [sys.executable, "-c", script, "bench", "--url", f"http://{at}", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])},
        )
    assert done.returncode == 0, done.stderr
    assert application.together > 200
    assert json.loads(path.read_text())["summary"]["failed"] == {}


URL = ("--url", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rate", "5"), ("--rate", "--url")),
        (("--slo", "ttft:1s"), ("--slo", "--url")),
        ((*URL, "--drafter", "ngram"), ("--drafter", "--url")),
        ((*URL, "--compare"), ("--compare", "--url")),
        ((*URL, "--threads", "1"), ("--threads",)),
        ((*URL, "--repeat", "2"), ("--repeat",)),
        (("--url", "localhost:8000"), ("--url", "http://")),
        ((*URL, "--slo", "ttft:1"), ("--slo ttft", "time")),
        ((*URL, "--duration", "0s"), ("--duration",)),
        ((*URL, "--timeout", "x"), ("--timeout", "time")),
        ((*URL, "--rate", "0"), ("--rate",)),
        ((*URL, "--rate", "nan"), ("--rate",)),
        ((*URL, "--requests", "0"), ("--requests",)),
        ((*URL, "--body", "[1]"), ("--body", "object")),
        ((*URL, "--body", '{"a": NaN}'), ("--body", "object")),
        ((*URL, "--body", '{"stream": false}'), ("--body", "stream")),
        ((*URL, "--compare-with", "/nowhere/x.json"), ("/nowhere/x.json",)),
        ((*URL, "--api-key-file", "/nowhere/key"), ("/nowhere/key",)),
        ((*URL, "--plot", "x.gif"), ("x.gif", ".svg")),
        (URL, ("127.0.0.1:9", "running")),
        ((*URL, "--model", "m"), ("127.0.0.1:9", "running")),
    ],
)
def test_mistakes_are_named(wager: Call, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(wager("bench", *arguments), *words)


def test_servers_are_measured_side_by_side(tmp_path: Path) -> None:
    """dev/bench_servers.py on two servers, of which one is three times as quick."""
    here = Path(__file__).parent
    script = here.parents[1] / "dev" / "bench_servers.py"
    common = f"{sys.executable} {here / 'load_servers.py'} {{port}} 0.01"
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            "--output",
            str(tmp_path),
            "--servers",
            "",
            "--server",
            f"quick={common} 0.01 1",
            "--server",
            f"slow={common} 0.03 1",
            "--users",
            "1,2",
            "--rounds",
            "1",
            "--requests",
            "2",
            "--tokens",
            "9",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "servers.json").read_text())
    assert [(point["server"], point["users"], point["first"]) for point in found["points"]] == [
        ("quick", 1, 0),
        ("slow", 1, 0),
        ("slow", 2, 2),
        ("quick", 2, 2),
    ]
    assert [point["summary"]["tokens"] for point in found["points"]] == [18, 18, 36, 36]
    assert all(point["summary"]["itl_s"]["p50"] >= 0.029 for point in found["points"] if point["server"] == "slow")
    assert found["medians"]["slow"]["2"]["ttft_s.p50"] >= 0.01
    assert (tmp_path / "servers.svg").read_text().startswith("<?xml")
