"""Stop strings: nothing streamed is ever taken back, whatever the tokens' edges."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from wager.engine.sequence import Detokenizer


class Pieces:
    """Tokens are pieces of text, and an `a` is held back until the end."""

    def push(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return "a"


def stream(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    out, shown = Detokenizer(Pieces(), stop), ""
    for character in text:
        if not out.stopped:
            shown += out.push(character)  # type: ignore[arg-type]
    return shown + out.flush(), out.stopped


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_equals_cutting_the_whole_text(text: str, stops: list[str]) -> None:
    whole = text + "a"
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    if not ends:
        assert stream(text, tuple(stops)) == (whole, False)
        return
    first_end = min(end for end, _ in ends)  # streaming sees the stop string that is complete first
    expected = min(start for end, start in ends if end == first_end)
    assert stream(text, tuple(stops)) == (whole[:expected], True)


@given(st.lists(st.text("ab", max_size=6), max_size=8), st.lists(st.text("ab", min_size=1, max_size=9), max_size=3))
def test_no_more_is_held_back_than_may_begin_a_stop_string(texts: list[str], stops: list[str]) -> None:
    out, whole, shown = Detokenizer(Pieces(), stops), "", ""
    for text in texts:
        whole += text
        shown += out.push(text)  # type: ignore[arg-type]
        if out.stopped:
            return
        ends = [whole[at:] for at in range(len(whole) + 1)]
        assert shown + next(end for end in ends if not end or any(stop.startswith(end) for stop in stops)) == whole


def test_no_stop_string_is_looked_for_in_the_first_tokens() -> None:
    out = Detokenizer(Pieces(), ("a",), min_tokens=2)
    assert [out.push(text) for text in "aaba"] == ["a", "a", "b", ""] and out.stopped  # type: ignore[arg-type]


def test_a_long_stop_string_that_was_begun_in_vain_costs_no_search_for_another() -> None:
    """Calls are counted: one for each length that might be held would be thousands, each of thousands of characters."""
    out, calls = Detokenizer(Pieces(), ("a" * 3000 + "c",)), [0]
    assert out.push("a" * 3000) == ""  # type: ignore[arg-type]

    def count(frame: object, event: str, argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        shown = out.push("b")  # type: ignore[arg-type]
    finally:
        sys.setprofile(before)
    assert shown == "a" * 3000 + "b" and calls[0] < 100
