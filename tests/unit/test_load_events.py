"""Server-sent events: every way in which the specification lets a server write them, cut anywhere."""

from __future__ import annotations

import random

import pytest

from wager.bench import load_events
from wager.bench.load_events import EventReader

CASES = {
    "as most servers write": (b'data: {"a": 1}\n\ndata: [DONE]\n\n', ['{"a": 1}', "[DONE]"]),
    "carriage returns and line feeds": (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    "carriage returns alone": (b"data: a\r\rdata: b\r\r", ["a", "b"]),
    "all line ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\n", ["a", "b", "c"]),
    "comments": (b": ping\n\ndata: a\n: ping\n\n:\n\n", ["a"]),
    "several lines": (b"data: {\ndata:  1}\ndata\n\n", ["{\n 1}\n"]),
    "no blank after the colon": (b"data:a\n\ndata:  b\n\n", ["a", " b"]),
    "other fields": (b"event: x\nid: 3\nretry: 5\ndata: a\nunknown\n\n", ["a"]),
    "no data": (b"event: x\n\n\n\ndata: a\n\n", ["a"]),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbf\n\n", ["a", "\ufeff"]),
    "letters of several bytes": ("data: é😀\n\ndata: \u2028\n\n".encode(), ["é😀", "\u2028"]),
    "what is not UTF-8": (b"data: \xff\n\n", ["\ufffd"]),
    "an end without its blank line": (b"data: a\n\ndata: b\n", ["a", "b"]),
    "an end in the middle of a line": (b'data: a\n\ndata: {"b', ["a"]),
    "OpenAI's last event in the middle of a line": (b"data: a\n\ndata: [DONE]", ["a", "[DONE]"]),
}


def read(pieces: list[bytes]) -> list[str]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


@pytest.mark.parametrize("name", CASES)
def test_events_are_read_whole(name: str) -> None:
    data, events = CASES[name]
    assert read([data]) == events


@pytest.mark.parametrize("name", CASES)
def test_events_are_the_same_however_the_bytes_are_cut(name: str) -> None:
    """Byte by byte, at every place, and with empty pieces between."""
    data, events = CASES[name]
    assert read([bytes([byte]) for byte in data]) == events
    for at in range(len(data) + 1):
        assert read([data[:at], b"", data[at:]]) == events, at


def test_events_are_the_same_in_random_pieces() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab\u00e9 :{}", k=rng.randrange(12))) for _ in range(300)]
    ends = [rng.choice(("\n", "\r\n", "\r")) for _ in texts]
    stream = "".join(f"data: {text}{end}{end}" for text, end in zip(texts, ends, strict=True)).encode()
    for _ in range(20):
        places = sorted(rng.sample(range(len(stream)), 200))
        assert read([stream[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]) == texts


def test_an_event_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_events, "LONGEST_EVENT", 1000)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * 900)
    with pytest.raises(ValueError, match="MiB"):
        reader.feed(b"x" * 200)
    reader = EventReader()
    with pytest.raises(ValueError, match="MiB"):
        for _ in range(1001):
            reader.feed(b"data: xx\n")
