"""The dashboard in a real browser: its numbers while requests run, the playground by keyboard, refusals, hostile text,
keys, and what axe-core says of it.

The browser is Debian's `chromium`, or what WAGER_TEST_CHROMIUM names; without one these tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from serve.serving import TINY, RealServer, server_process

pytestmark = pytest.mark.slow


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

HOSTILE = """<img src=x onerror="window.taken=1"><script>window.taken=1</script><b>&lt;</b>"""
"""The name of a model."""

REFUSED = "Failed to load resource"
"""What Chromium writes to the console for every answer that is no success, and for none."""

WATCH = """
window.said = [];
new MutationObserver((changes) => {
  for (const { target } of changes) {
    const region = (target.closest ? target : target.parentElement).closest('[role=status], [role=alert], [aria-live]');
    if (region) window.said.push([region.id, region.textContent]);
  }
}).observe(document.body, { subtree: true, childList: true, characterData: true });
"""
"""Notes what a screen reader would say by itself."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser. Playwright keeps an event loop in this thread while it runs, so it ends with the module's tests."""
    driver = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed, which the tests of the dashboard use"
    )
    given = os.environ.get("WAGER_TEST_CHROMIUM")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no Chromium for the tests of the dashboard: install it, or set WAGER_TEST_CHROMIUM")
    with driver.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found)
        except driver.Error as error:
            if given:
                raise
            pytest.skip(f"{found} does not start: {error}")
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def tiny(browser: Any) -> Iterator[RealServer]:
    """A small random model, under a hostile name; only if there is a browser."""
    with server_process(*TINY, "--drafter", "ngram", "--served-name", HOSTILE) as started:
        yield started


@dataclass
class Visit:
    """A page of the dashboard, what it wrote to the console as errors, and the addresses that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def cells(self, selector: str) -> list[str]:
        """The texts of a row of a table."""
        return [str(text) for text in self.page.locator(selector).locator("th, td").all_inner_texts()]

    def wait(self, condition: str, *, seconds: float = 90) -> None:
        """Until an expression of JavaScript is true."""
        self.page.wait_for_function(f"() => {condition}", timeout=1000 * seconds)

    def wait_for_text(self, identity: str, text: str, *, seconds: float = 90) -> None:
        """Until an element, named by its id, contains a text."""
        self.page.wait_for_function(
            "([id, text]) => document.getElementById(id).textContent.includes(text)",
            arg=[identity, text],
            timeout=1000 * seconds,
        )

    def write_over(self, selector: str, text: str) -> None:
        self.page.locator(selector).fill(text)

    def change_request(self, **fields: Any) -> None:
        """What the playground sends has these fields besides its own."""

        def change(route: Any) -> None:
            route.continue_(post_data={**route.request.post_data_json, **fields})

        self.page.route("**/v1/chat/completions", change)


@contextmanager
def visiting(browser: Any, url: str, *, refusals: bool = False, **options: Any) -> Iterator[Visit]:
    """The dashboard in a fresh profile. In the end there must have been no error on its console (but `refusals`, if
    those are expected), and no request for anything from elsewhere."""
    context = browser.new_context(**options)
    visit = Visit(context.new_page())
    visit.page.on("console", lambda message: visit.errors.append(message.text) if message.type == "error" else None)
    visit.page.on("pageerror", lambda error: visit.errors.append(str(error)))
    visit.page.on("request", lambda request: visit.asked.append(request.url))
    try:
        visit.page.goto(url)
        yield visit
        errors = [text for text in visit.errors if not (refusals and text.startswith(REFUSED))]
        assert not errors, f"on the console: {errors}"
        elsewhere = [asked for asked in visit.asked if not asked.startswith((f"{url}/", "data:"))]
        assert not elsewhere, f"asked for: {elsewhere}"
    finally:
        context.close()


# ---- the tests -------------------------------------------------------------------------------------------------------


BODY = "document.querySelector('.theirs .body')"
"""The text of the first answer."""

QUESTION = "Write a short note about lighthouses, and then write it again."


@pytest.fixture(scope="module")
def real(browser: Any, smollm2: Path) -> Iterator[RealServer]:
    with server_process("--model", str(smollm2), "--served-name", "SmolLM2") as started:
        yield started


@contextmanager
def load(server: RealServer, *, clients: int = 4) -> Iterator[None]:
    """So many clients that ask one question after the other, each a new one."""
    end = threading.Event()

    def ask(number: int) -> None:
        with httpx2.Client(base_url=server.url, timeout=120) as http:
            while not end.is_set():
                messages = [{"role": "user", "content": f"{QUESTION} Mention the number {number}."}]
                body = {"messages": messages, "max_tokens": 240, "temperature": 0, "stream": True}
                with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    any(end.is_set() or "[DONE]" in line for line in answer.iter_lines())
                number += clients

    with ThreadPoolExecutor(clients) as pool:
        done = [pool.submit(ask, number) for number in range(clients)]
        try:
            yield
        finally:
            end.set()
    for each in done:
        each.result()


@pytest.mark.real
def test_numbers_move_while_requests_run(browser: Any, real: RealServer) -> None:
    with visiting(browser, real.url) as visit:
        visit.wait_for_text("status", "live")
        with load(real):
            visit.wait("Number(document.getElementById('speed').textContent.replace(',', '')) > 1")
            visit.wait("Number(document.getElementById('running').textContent) >= 1")
            visit.wait("parseFloat(document.getElementById('speedup').textContent) > 0")
            for chart in ("speed", "batch", "speedup", "cost", "cache"):
                visit.wait(f"document.querySelector('#{chart}-chart polyline')?.getAttribute('points').includes(' ')")
            visit.wait("document.querySelectorAll('#stage-chart polygon').length >= 7")
            for stage in ("forward", "policy", "draft", "accept", "commit"):
                assert stage in visit.text("#stage-chart .legend")
            before = visit.page.locator("#speed-chart polyline").get_attribute("points")
            visit.wait(f"document.querySelector('#speed-chart polyline').getAttribute('points') != '{before}'")
            depths = visit.page.locator("#depth-chart svg").get_attribute("aria-label")
            assert "depth 0: " in depths and "depth 1: " in depths
            visit.wait("/depth 1: [1-9]\\d* %/.test(document.querySelector('#acceptance-chart svg').ariaLabel)")
            visit.wait("/tokens [1-9]: [1-9]/.test(document.querySelector('#tau-chart svg').ariaLabel)")
            _, drafted, admitted, accepted, tau = visit.cells("#guesses-recent tr >> nth=0")
            shares = re.fullmatch(r"([\d,]+) \((\d+) %\)", accepted)
            counts = [int(text.replace(",", "")) for text in (drafted, admitted, shares[1])]
            assert counts == sorted(counts, reverse=True) and 0 < int(shares[2]) <= 100 and 1 < float(tau) < 20
            assert visit.cells("#guesses-all tr >> nth=0")[0] == "since the start"
            with visiting(browser, real.url) as fresh:
                fresh.wait(
                    "document.querySelector('#speed-chart polyline')?.getAttribute('points').split(' ').length > 3"
                )
        visit.wait("document.getElementById('running').textContent == '0'")
        visit.wait("document.getElementById('speed').textContent == '0'")
        live = real.live()
        assert visit.cells("#guesses-all tr >> nth=0")[-1] == f"{live['tokens'] / live['rounds']:.2f}"


def test_one_busy_second_is_seen_in_the_charts(browser: Any, tiny: RealServer) -> None:
    with visiting(browser, tiny.url) as visit:
        visit.wait_for_text("status", "live")
        tiny.chat(messages=[{"role": "user", "content": "one two"}], max_tokens=8)
        for drawn in ("#stage-chart polygon", "#speedup-chart polyline", "#cost-chart polyline"):
            visit.wait(f"document.querySelector('{drawn}')?.getBBox().width > 0.5", seconds=10)


@pytest.mark.real
def test_a_message_by_keyboard_alone_is_answered_in_the_colours_of_who_guessed(browser: Any, real: RealServer) -> None:
    with visiting(browser, real.url, permissions=["clipboard-read", "clipboard-write"]) as visit:
        visit.wait_for_text("status", "live")
        keyboard = visit.page.keyboard
        keyboard.press("Tab")
        keyboard.press("Enter")  # the link to the playground
        keyboard.press("Control+A")
        keyboard.type(QUESTION)
        visit.page.evaluate(WATCH)
        with visit.page.expect_response("**/v1/chat/completions") as response:
            keyboard.press("Enter")
        visit.wait(f"{BODY}.textContent.length > 10")
        part = visit.page.evaluate(f"[{BODY}.textContent.length, outcome.textContent]")
        visit.wait_for_text("outcome", "tokens in")
        assert part[1] == "answering" and part[0] < len(visit.page.locator(".theirs .body").text_content()), (
            "it did not come piece by piece"
        )
        plain = real.chat(
            messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=400, speculation="off"
        )
        [seed] = re.findall(r'"seed":(\d+)', response.value.text())
        assert f"seed {seed}" in visit.text("#outcome"), "all digits of it"
        visit.page.locator(".copy").click()
        visit.wait("document.querySelector('.copy').textContent == 'Copied'")
        content = plain["choices"][0]["message"]["content"]
        assert visit.page.evaluate("navigator.clipboard.readText()") == content
        [mark] = visit.page.locator("#answer mark").all()[:1]
        name = mark.get_attribute("title").removeprefix("guessed by ")
        assert name in visit.text("#guessers") and f" by {name}" in visit.text("#outcome")
        line = mark.evaluate("(one) => getComputedStyle(one).textDecorationLine")
        assert line == "underline", "colour is not the only sign"
        assert not visit.page.locator("#answer del").first.is_visible()
        visit.page.locator("#colours").focus()
        keyboard.press("Space")
        assert mark.evaluate("(one) => getComputedStyle(one).textDecorationLine") == "none"
        keyboard.press("Tab")
        keyboard.press("Space")
        assert visit.page.locator("#answer del").first.is_visible()
        said = visit.page.evaluate("window.said")
        assert [identity for identity, _ in said] == ["outcome", "outcome"], "the answer is not read out piece by piece"


def test_a_conversation_has_several_turns_until_a_new_one_begins(browser: Any, tiny: RealServer) -> None:
    with visiting(browser, tiny.url) as visit:
        visit.change_request(max_tokens=9, ignore_eos=True)
        for number, message in enumerate(("one two", "three")):
            visit.write_over("#prompt", message)
            with visit.page.expect_request("**/v1/chat/completions") as request:
                visit.page.locator("#prompt").press("Enter")
            visit.wait(f"document.querySelectorAll('.theirs .copy:not([hidden])').length == {number + 1}")
        sent = request.value.post_data_json["messages"]
        assert [each["role"] for each in sent] == ["user", "assistant", "user"] and sent[2]["content"] == "three"
        visit.page.locator("#new").click()
        assert visit.page.locator(".turn").count() == 0
        assert visit.page.evaluate("document.activeElement.id") == "prompt"


MARKDOWN = """# Title

A *b* **c** `d*e*` 2 * 3 * 4 snake_case_name
still

- one
  - two
- three

3. four

> said

| x | y |
|---|---|
| 1 | **2** |

```py
# <b> *raw*
```
"""

DRAWN = (
    "<h3>Title</h3><p>A <em>b</em> <strong>c</strong> <code>d*e*</code> 2 * 3 * 4 snake_case_name\nstill</p>"
    "<ul><li>one<ul><li>two</li></ul></li><li>three</li></ul><ol start='3'><li>four</li></ol>"
    "<blockquote>said<br></blockquote>"
    "<table><tbody><tr><th>x</th><th>y</th></tr><tr><td>1</td><td><strong>2</strong></td></tr></tbody></table>"
    "<pre><code># &lt;b&gt; *raw*\n</code></pre>"
)


def test_markdown_becomes_elements_and_every_text_keeps_its_place(browser: Any, tiny: RealServer) -> None:
    draw = """async (text) => {
        const { blocks, drawn } = await import('/markdown.js');
        let last = 0;
        const emit = (parent, from, to) => {
            if (from < last) throw Error(`${from} after ${last}`);
            last = to;
            parent.append(text.slice(from, to));
        };
        return blocks(text).map((block) => drawn(text, block, emit).outerHTML).join('');
    }"""
    with visiting(browser, tiny.url) as visit:
        found = visit.page.evaluate(draw, MARKDOWN)
        plain = re.sub(r' tabindex="0"|</?div[^>]*>', "", found.replace('start="3"', "start='3'"))
        assert plain.replace("</li> <", "</li><") == DRAWN
        for end in range(len(MARKDOWN)):  # as it comes
            visit.page.evaluate(draw, MARKDOWN[:end])


@pytest.mark.real
def test_escape_stops_an_answer(browser: Any, real: RealServer) -> None:
    with visiting(browser, real.url) as visit:
        visit.change_request(ignore_eos=True)
        visit.write_over("#tokens", "4000")
        visit.write_over("#prompt", QUESTION)
        visit.page.locator("#prompt").press("Enter")
        visit.wait(f"{BODY}.textContent.length > 10")
        visit.page.keyboard.press("Escape")
        visit.wait_for_text("outcome", "Stopped after")
        visit.page.wait_for_timeout(600)
        assert real.live()["running"] == 0, "the server goes on"


@pytest.mark.parametrize(
    ("fields", "changed", "sentence", "marked"),
    [
        ({"#temperature": "5"}, {}, "The field 'temperature' is not possible: ", "temperature"),
        ({"#prompt": "  "}, {}, "There is no message yet. Write one.", "prompt"),
        ({}, {"ignore_eos": HOSTILE}, "The field 'ignore_eos' is not possible: ", None),
    ],
    ids=["temperature", "no message", "no field of the form"],
)
def test_a_refusal_is_a_sentence_beside_the_field(
    browser: Any, tiny: RealServer, fields: dict[str, str], changed: dict[str, Any], sentence: str, marked: str | None
) -> None:
    with visiting(browser, tiny.url, refusals=True) as visit:
        if changed:
            visit.change_request(**changed)
        for selector, text in {"#prompt": "Hello", **fields}.items():
            visit.write_over(selector, text)
        visit.page.locator("#send").press("Enter")
        visit.wait_for_text("problem", sentence)
        assert visit.page.get_by_role("alert").filter(has_text=sentence).is_visible()
        assert visit.page.evaluate("[...document.querySelectorAll('[aria-invalid=true]')].map((one) => one.id)") == (
            [marked] if marked else []
        )
        if marked:
            assert visit.page.evaluate("document.activeElement.id") == marked
        assert visit.page.evaluate("[document.querySelectorAll('.turn').length, play.elements.prompt.value]") == [
            0,
            fields.get("#prompt", "Hello"),
        ], "what got no answer can be sent again"
        assert visit.page.evaluate("window.taken") is None


def test_hostile_text_stays_text(browser: Any, tiny: RealServer) -> None:
    """The model is made to answer with markup; its name is markup too."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": HOSTILE}}}
    with visiting(browser, tiny.url) as visit:
        visit.change_request(response_format=schema, max_tokens=600)
        visit.write_over("#prompt", HOSTILE)
        visit.page.locator("#prompt").press("Enter")
        visit.wait_for_text("outcome", "tokens in")
        assert visit.text("#model") == HOSTILE
        assert HOSTILE.replace('"', '\\"') in visit.page.locator("#answer").inner_text()
        assert visit.page.locator("#answer mark").count() > 0 and "by grammar" in visit.text("#outcome")
        assert visit.page.locator("img, b img, #answer script, #answer b, #model *").count() == 0
        assert visit.page.evaluate("window.taken") is None


def test_scripts_cannot_make_markup_of_text(browser: Any, tiny: RealServer) -> None:
    """Nor call elsewhere: the browser refuses it, whatever the scripts do."""
    markup = "document.body.innerHTML = '<p>'"
    script = "document.createElement('script').src = '/charts.js'"
    call = "await fetch('http://127.0.0.1:9/')"
    with visiting(browser, tiny.url) as visit:
        for attempt in (markup, script, call):
            answer = f"async () => {{ try {{ {attempt}; return 'done'; }} catch (error) {{ return error.name; }} }}"
            assert visit.page.evaluate(answer) == "TypeError", attempt
        assert [text for text in visit.errors if "violates" in text or "Content Security Policy" in text]
        visit.errors.clear()
        visit.asked[:] = [url for url in visit.asked if ":9/" not in url]


def test_a_key_is_asked_for_and_used(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("correct-horse-battery-staple\n", encoding="utf-8")
    with (
        server_process(*TINY, "--api-key-file", str(keys)) as server,
        visiting(browser, server.url, refusals=True) as visit,
    ):
        keyboard = visit.page.keyboard
        visit.wait_for_text("status", "The server asks for an API key.")
        assert visit.page.evaluate("document.activeElement.id") == "key"
        assert visit.page.get_by_label("API key").get_attribute("type") == "password"
        for wrong, sentence in (
            ("schlüssel-der-nicht-geht", "printable ASCII"),
            ("wrong-horse-battery-staple", "does not know this key"),
        ):
            visit.write_over("#key", wrong)
            keyboard.press("Enter")
            visit.wait_for_text("key-problem", sentence)
        visit.write_over("#prompt", "Hello")
        visit.page.locator("#send").press("Enter")
        visit.wait_for_text("problem", "The API key is not known.")
        visit.write_over("#key", "correct-horse-battery-staple")
        visit.page.locator("#key").press("Enter")
        visit.wait_for_text("status", "live")
        assert not visit.page.locator("#key-form").is_visible()
        assert visit.page.evaluate("document.activeElement.id") == "prompt"
        visit.change_request(max_tokens=9, ignore_eos=True)
        keyboard.press("Enter")
        visit.wait_for_text("outcome", "9 tokens in")
        visit.page.reload()
        visit.wait_for_text("status", "live")
        assert not any("horse" in url for url in visit.asked)


@pytest.mark.real
def test_the_picture_of_the_documents(browser: Any, real: RealServer, tmp_path: Path) -> None:
    """With WAGER_DASHBOARD_IMAGE=FILE it is taken after two minutes of changing load, for the documents."""
    given = os.environ.get("WAGER_DASHBOARD_IMAGE")
    picture = Path(given) if given else tmp_path / "dashboard.png"
    size = {"width": 1280, "height": 800}
    with visiting(browser, real.url, viewport=size, color_scheme="light", reduced_motion="reduce") as visit:
        for clients in (2, 6, 3, 8) if given else ():
            with load(real, clients=clients):
                visit.page.wait_for_timeout(30_000)
        with load(real):
            visit.page.wait_for_timeout(30_000 if given else 3000)
            visit.page.locator("#rejected").check()
            for message in ("Say three reasons to read books, as a list.", "Say it again, but shorter."):
                visit.write_over("#prompt", message)
                visit.page.locator("#prompt").press("Enter")
                visit.wait_for_text("outcome", "tokens in", seconds=60)
            visit.page.locator("#prompt").blur()
            visit.page.wait_for_timeout(1200)
            visit.page.screenshot(path=picture, full_page=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- for everybody ---------------------------------------------------------------------------------------------------


FIXED_AND_FREE: Any = {
    "fixed": {"const": "guessed by the grammar"},
    "free": {"type": "string", "minLength": 60, "maxLength": 60},
}
SCHEMA = {"type": "object", "required": ["fixed", "free"], "properties": FIXED_AND_FREE, "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
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


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 320)])
def test_axe_finds_nothing_and_no_part_is_too_wide(browser: Any, tiny: RealServer, scheme: str, width: int) -> None:
    """Names, roles, contrast, structure: all rules of axe-core, WCAG and best practices."""
    axe = pytest.importorskip("axe_playwright_python")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    options: Any = dict(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    with visiting(browser, tiny.url, **options) as visit:
        visit.wait_for_text("status", "live")
        fill(visit)
        visit.page.evaluate("document.getElementById('model').textContent = 'm'.repeat(200)")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        visit.page.evaluate(script)
        found = visit.page.evaluate("axe.run()")
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]] == []
        assert len(found["passes"]) > 20 and any(rule["id"] == "color-contrast" for rule in found["passes"])
