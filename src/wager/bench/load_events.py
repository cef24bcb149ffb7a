"""Reads server-sent events from bytes as they arrive, in whatever pieces (WHATWG HTML, section 9.2.6).

Only the data of events is kept: comments, event names and ids are passed over.
"""

from __future__ import annotations

import re

LONGEST_EVENT = 1 << 24
"""Bytes of one event; a longer one is no event of a language model."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_MARK = b"\xef\xbb\xbf"


class EventReader:
    """The data of each event, in order; what is incomplete waits for the next bytes."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._after_cr = False
        self._began = False
        self._held = 0

    def feed(self, data: bytes) -> list[str]:
        """Data of the events that these bytes complete. ValueError for one that is longer than LONGEST_EVENT."""
        whole = data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2 and b"\r" not in data
        if whole and not (self._rest or self._lines):  # one event, as servers mostly send them
            self._began, self._after_cr = True, False
            return [data[6:-2].decode("utf-8", "replace")]
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        data = self._rest + data
        if not self._began:
            if len(data) < len(_MARK) and _MARK.startswith(data):
                self._rest = data
                return []
            data, self._began = data.removeprefix(_MARK), True
        self._after_cr = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(data)
        if self._held + len(self._rest) > LONGEST_EVENT:
            raise ValueError(f"an event of more than {LONGEST_EVENT >> 20} MiB")
        events: list[str] = []
        for line in lines:
            self._take(line, events)
        return events

    def finish(self) -> list[str]:
        """Data of an event whose closing blank line is missing where the stream ends. An incomplete line is not data,
        except that of OpenAI's last event."""
        events: list[str] = []
        if self._rest in (b"data: [DONE]", b"data:[DONE]"):
            self._take(self._rest, events)
        self._rest = b""
        self._take(b"", events)
        return events

    def _take(self, line: bytes, events: list[str]) -> None:
        if not line:
            if self._lines:
                events.append(b"\n".join(self._lines).decode("utf-8", "replace"))
                self._lines, self._held = [], 0
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._lines.append(value.removeprefix(b" "))
            self._held += len(value)
