"""The dashboard for everybody: by keyboard, by screen reader, narrow, dark, without motion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve.browsing import WATCH, Visit, visiting
from serve.real_server import RealServer

ANSWER: Any = dict(max_tokens=40, ignore_eos=True, speculation={"depth": 3})

FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "required": ["fixed", "free"],
            "additionalProperties": False,
            "properties": {
                "fixed": {"const": "guessed by the grammar"},
                "free": {"type": "string", "minLength": 60, "maxLength": 60},
            },
        }
    },
}
"""Of an answer with guesses that are right and guesses that are wrong."""


def fill(visit: Visit) -> None:
    """Every part has something to show: an answer with guesses and rejected ones, tables, the policy's words."""
    visit.change_request(response_format=FORMAT, speculation={"depth": 3})
    visit.write_over("#prompt", "one two one two one two")
    visit.page.locator("#rejected").check()
    visit.page.locator("#prompt").press("Enter")
    visit.wait_for_text("outcome", "tokens in")
    assert visit.page.locator("#answer del").count() and visit.page.locator("#answer mark").count()
    for summary in visit.page.locator("summary").all():
        summary.click()
    visit.wait("document.getElementById('depth-table').rows.length > 1")


def show_key_form(visit: Visit) -> None:
    """Show the form for the API key beside everything else, for good."""
    visit.page.evaluate("""() => {
        const form = document.getElementById("key-form");
        form.removeAttribute("hidden");
        Object.defineProperty(form, "hidden", { value: false, writable: true });
    }""")


# ---- keyboard --------------------------------------------------------------------------------------------------------


def test_tab_reaches_every_control_in_the_pages_order_and_shows_where_it_is(browser: Any, tiny: RealServer) -> None:
    with visiting(browser, tiny.url) as visit:
        visit.wait_for_text("status", "live")
        focused = """() => {
          const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
          return [one.id || one.tagName.toLowerCase(), style.outlineStyle, parseFloat(style.outlineWidth), box.width > 0
            && box.left >= 0];
        }"""
        order = [
            "a",
            "summary",
            "summary",
            "prompt",
            "temperature",
            "tokens",
            "speculate",
            "rejected",
            "send",
            "stop",
            "answer",
        ]
        for way, wanted in (("Tab", order), ("Shift+Tab", order[-2::-1])):
            found = []
            for _ in wanted:
                visit.page.keyboard.press(way)
                name, style, width, seen = visit.page.evaluate(focused)
                assert style == "solid" and width >= 2 and seen, f"the focus on {name} is not to be seen"
                found.append(name)
            assert found == wanted
        controls = "a, button, input, textarea, summary, select, [tabindex]"
        reachable = visit.page.locator(f"{controls} >> visible=true").count()
        assert reachable == len(order)


def test_enter_shift_enter_and_space(browser: Any, tiny: RealServer) -> None:
    with visiting(browser, tiny.url) as visit:
        visit.wait_for_text("status", "live")
        visit.change_request(**ANSWER)
        prompt, keyboard = visit.page.locator("#prompt"), visit.page.keyboard
        prompt.fill("one")
        prompt.press("Shift+Enter")
        keyboard.type("two")
        assert prompt.input_value() == "one\ntwo" and visit.text("#outcome") == ""
        keyboard.press("Enter")
        visit.wait_for_text("outcome", "40 tokens in")
        assert prompt.input_value() == "one\ntwo"
        assert visit.page.evaluate("document.activeElement.id") == "prompt", "the keyboard lost its place"
        for key in ("Space", "Enter"):
            visit.page.locator("summary").first.press(key)
            opened = visit.page.locator("details").first.get_attribute("open")
            assert (opened is not None) == (key == "Space")
        for way in ("Enter", "Space"):
            visit.page.locator("#send").press(way)
            visit.wait_for_text("outcome", "40 tokens in")
            assert visit.page.evaluate("document.activeElement.id") == "send"


# ---- screen reader ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 320])
def test_axe_finds_nothing(browser: Any, tiny: RealServer, scheme: str, width: int) -> None:
    """Names, roles, contrast, structure: all rules of axe-core, WCAG and best practices."""
    axe = pytest.importorskip("axe_playwright_python")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    options: Any = dict(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    with visiting(browser, tiny.url, **options) as visit:
        visit.wait_for_text("status", "live")
        fill(visit)
        visit.collapse("Drafter ngram has collapsed.")
        visit.wait_for_text("alarm", "Drafter ngram has collapsed.")
        show_key_form(visit)
        visit.page.evaluate(script)
        found = visit.page.evaluate("axe.run()")
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []
        assert len(found["passes"]) > 20 and any(rule["id"] == "color-contrast" for rule in found["passes"])


def test_what_a_screen_reader_finds(browser: Any, tiny: RealServer) -> None:
    with visiting(browser, tiny.url) as visit:
        visit.wait_for_text("status", "live")
        fill(visit)
        page = visit.page
        for role, names in {
            "heading": ["wager", "Now", "The last three minutes", "Playground", "Throughput"],
            "textbox": ["Message"],
            "spinbutton": ["temperature", "at most"],
            "checkbox": ["speculate", "show rejected guesses"],
            "button": ["Send", "Stop"],
            "region": ["Now", "The last three minutes", "Playground", "Answer"],
            "table": ["Over time", "By depth"],
            "term": ["tokens a second", "waiting"],
        }.items():
            for name in names:
                by_text = role == "term"
                places = page.get_by_role(role).filter(has_text=name) if by_text else page.get_by_role(role, name=name)
                assert places.count(), f"there is no {role} {name!r}"
        charts = page.get_by_role("img").evaluate_all("all => all.map((one) => one.ariaLabel)")
        assert len(charts) == 8
        assert all(any(letter.isdigit() for letter in words) or "nothing yet" in words for words in charts)
        assert any(words.startswith("Throughput: ") and "tokens/s now, between " in words for words in charts)
        assert page.get_by_role("mark").count() > 0 and page.get_by_role("deletion").count() > 0


def test_numbers_that_change_are_not_read_out(browser: Any, tiny: RealServer) -> None:
    with visiting(browser, tiny.url) as visit:
        visit.wait_for_text("status", "live")
        visit.page.evaluate(WATCH)
        tiny.chat(messages=[{"role": "user", "content": "one two"}], max_tokens=100, ignore_eos=True)
        before = visit.page.locator("#speed-chart svg").get_attribute("aria-label")
        visit.page.wait_for_timeout(2500)
        assert visit.page.locator("#speed-chart svg").get_attribute("aria-label") != before
        assert visit.page.evaluate("window.said") == []


# ---- screens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [320, 480, 1280])
def test_nothing_is_wider_than_the_screen(browser: Any, tiny: RealServer, width: int) -> None:
    with visiting(browser, tiny.url, viewport={"width": width, "height": 700}) as visit:
        visit.wait_for_text("status", "live")
        fill(visit)
        show_key_form(visit)
        visit.page.evaluate("document.getElementById('model').textContent = 'm'.repeat(200)")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_and_light_are_the_systems(browser: Any, tiny: RealServer) -> None:
    found = {}
    for scheme in ("light", "dark"):
        with visiting(browser, tiny.url, color_scheme=scheme) as visit:
            rule = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
            found[scheme] = sum(visit.page.evaluate(rule))
    assert found["dark"] < 150 < 600 < found["light"]


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_nothing_moves_for_those_who_want_no_motion(browser: Any, tiny: RealServer, motion: str) -> None:
    with visiting(browser, tiny.url, reduced_motion=motion) as visit:
        visit.page.evaluate("document.getElementById('answer').classList.add('growing')")
        assert visit.page.evaluate("document.getAnimations().length") == (0 if motion == "reduce" else 1)
