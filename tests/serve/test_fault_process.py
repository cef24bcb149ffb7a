"""The process itself: killed within answers and started again at once, and every way in which it is told to end."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from serve.real_server import RealServer, http_request, served
from serve.serving import CHAT, LONG, MESSAGES, SHORT, eventually
from serve.test_fault_clients import deaf

SAMPLED: Any = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0.8, "seed": 11, "ignore_eos": True}
MINUTES: Any = {**LONG, "max_tokens": 8000, "stream": True, "n": 8}
"""Some ten seconds of answers, in a context of 8192."""

ROOMY = ("--max-context", "8192", "--drafter", "none")


def stream_in_background(server: RealServer, body: Any) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []

    def read() -> None:
        try:
            with httpx2.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)
        except httpx2.TransportError as error:
            lines.append(f"lost: {type(error).__name__}")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, lines


def test_killed_within_answers_it_starts_again_at_once_at_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock, no socket, no half-written file is in the way; the answers are the same."""
    monkeypatch.setenv("WAGER_CACHE", str(tmp_path))
    texts, port, files = [], "0", []
    for _ in range(3):
        with served(*ROOMY[:2], "--port", port) as server:
            texts.append((server.text(SAMPLED), server.text(LONG)))
            port = str(server.port)
            reading = [stream_in_background(server, MINUTES) for _ in range(4)]
            eventually(lambda: server.live()["running"] > 0, "nothing runs")
            server.process.send_signal(signal.SIGKILL)
            assert server.process.wait(10) == -signal.SIGKILL
            for thread, lines in reading:
                thread.join(10)
                assert lines[-1].startswith("lost") and not any("[DONE]" in line for line in lines)
        files.append(sorted(path.name for path in tmp_path.rglob("*") if path.is_file()))
    assert len(set(texts)) == 1
    assert files[1] == files[2] and not [name for name in files[2] if "tmp" in name or "part" in name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    """What runs is answered whole; half a request and new connections are not taken; it exits with 0."""
    with served() as server, ThreadPoolExecutor(4) as pool:
        plain = server.text(LONG)
        half = server.connect(http_request(LONG)[:-5])
        answers = [pool.submit(server.post, CHAT, LONG) for _ in range(4)]
        eventually(lambda: server.live()["open"] == 4 or all(each.done() for each in answers), "nothing runs")
        server.process.send_signal(number)
        time.sleep(0.3)
        half.sendall(b"e}".rjust(5))
        with pytest.raises(httpx2.TransportError):
            server.post(CHAT, SHORT)
        assert [each.result().json()["choices"][0]["message"]["content"] for each in answers] == [plain] * 4
        assert b" 4" in (head := half.recv(200)) or b" 503 " in head
        assert server.process.wait(30) == 0


def test_a_second_sigterm_changes_nothing_and_the_drain_timeout_ends_the_rest_by_name() -> None:
    with served(*ROOMY, "--drain-timeout", "1") as server:
        thread, lines = stream_in_background(server, MINUTES)
        eventually(lambda: server.live()["running"] == 8, "nothing runs")
        begin = time.monotonic()
        server.process.terminate()
        time.sleep(0.2)
        server.process.terminate()
        assert server.process.wait(30) == 0
        assert 0.9 < time.monotonic() - begin < 10
        thread.join(10)
        assert lines[-1] == "data: [DONE]" and "".join(lines).count('"finish_reason":"abort"') == 8


def test_a_second_ctrl_c_ends_it_at_once_without_a_traceback() -> None:
    with served(*ROOMY) as server:
        _, lines = stream_in_background(server, MINUTES)
        eventually(lambda: server.live()["running"] == 8, "nothing runs")
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) in (0, 130)
        assert time.monotonic() - begin < 15, lines[-1:]


def test_clients_that_do_not_read_do_not_hold_up_the_end() -> None:
    with served(*ROOMY, "--drain-timeout", "1") as server:
        connections = [deaf(server.url, {**MINUTES, "speculation_stats": True}) for _ in range(3)]
        eventually(lambda: server.live()["running"] > 0, "nothing runs")
        time.sleep(1)
        server.process.terminate()
        assert server.process.wait(30) == 0
        for connection in connections:
            connection.close()
