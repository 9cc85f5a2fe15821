"""A real browser: Debian's Chromium, driven by Playwright. Never one that Playwright downloads."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or ""
FLAGS = [
    "--no-sandbox",  # tests run as root in containers, where it cannot start with one
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
]
MOST_STOPS = 120
"""A page that has more of them is no page for a keyboard."""
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine: apt-get install chromium")


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page, and everything it complained about."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 1000}, **options})
        self.context.set_default_timeout(45_000)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))

    def _hear(self, said: Any) -> None:
        if said.type == "error":
            self.complaints.append(f"{said.text} {said.location['url'].split('/', 3)[-1]}")

    def open(self, url: str) -> Tab:
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")
        return self

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def wait_for_text(self, selector: str, text: str) -> None:
        from playwright.sync_api import TimeoutError as TooLate

        try:
            self.page.wait_for_function(
                "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)",
                arg=[selector, text],
            )
        except TooLate:
            said = self.page.text_content(selector) if self.page.locator(selector).count() else "is not there"
            raise AssertionError(f"{selector} did not say {text!r} in time: {str(said)[:3000]}") from None

    def tab_to(self, wanted: str) -> None:
        """Press Tab until this is so."""
        for _ in range(MOST_STOPS):
            if self.page.evaluate(wanted):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"{MOST_STOPS} times Tab, and never {wanted}")

    def act(self, button: str, reason: str = "") -> None:
        """Press a button that asks first, and say yes."""
        self.page.click(button)
        self.page.fill("#confirm-reason", reason)
        self.page.click("#confirm-yes")
