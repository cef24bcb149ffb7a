"""Stop strings: nothing streamed is ever taken back, whatever the tokens' edges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wager.engine.detokenizer import Detokenizer


class Spelling:
    """Tokens are characters' code points; nothing is held back."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def stream(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    out, shown = Detokenizer(Spelling(), stop), ""
    for character in text:
        shown += out.push(ord(character))
        if out.stopped:
            return shown, True
    return shown + out.flush(), False


def test_the_text_ends_before_the_first_stop_string() -> None:
    assert stream("one two three", ("two",)) == ("one ", True)
    assert stream("one two", ("twenty",)) == ("one two", False)
    assert stream("aaab", ("aab",)) == ("a", True)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    out = Detokenizer(Spelling(), ("###",))
    assert [out.push(ord(c)) for c in "a##b"] == ["a", "", "", "##b"]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_equals_cutting_the_whole_text(text: str, stops: list[str]) -> None:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert stream(text, tuple(stops)) == (text, False)
        return
    first_end = min(end for end, _ in ends)  # streaming sees the stop string that is complete first
    expected = min(start for end, start in ends if end == first_end)
    assert stream(text, tuple(stops)) == (text[:expected], True)
