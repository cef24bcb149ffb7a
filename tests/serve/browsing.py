"""A headless Chromium for tests of the dashboard.

The browser is Debian's `chromium`, or what WAGER_TEST_CHROMIUM names; without one these tests are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

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


@contextmanager
def chromium() -> Iterator[Any]:
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


@dataclass
class Visit:
    """A page of the dashboard, what it wrote to the console as errors, and the addresses that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def wait(self, condition: str, *, seconds: float = 30) -> None:
        """Until an expression of JavaScript is true."""
        self.page.wait_for_function(f"() => {condition}", timeout=1000 * seconds)

    def wait_for_text(self, identity: str, text: str, *, seconds: float = 30) -> None:
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

    def collapse(self, sentence: str) -> None:
        """From now on the server says that a drafter has collapsed."""

        def change(route: Any) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json={**answer.json(), "collapsed": {"ngram": sentence}})

        self.page.route("**/live", change)


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
