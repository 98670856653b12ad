"""A page of a server in a real browser, where playwright and a browser are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def page_in_a_browser(address: str) -> Iterator[Any]:
    """The page in a browser. Fails the test if anything went wrong in it, a breach of its content policy included."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright and a browser")
    own = next(filter(None, map(shutil.which, BROWSERS)), None)
    wrong: list[str] = []
    with api.sync_playwright() as playwright:
        try:  # Chromium refuses root its sandbox
            started = playwright.chromium.launch(executable_path=own, args=[] if os.getuid() else ["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser could be started: {str(error).splitlines()[0]}")
        opened = started.new_page(viewport={"width": 1400, "height": 900})
        opened.set_default_timeout(20_000)
        opened.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.goto(address)
        opened.wait_for_selector("#status[data-state=ready]")
        yield opened
        started.close()
    assert not wrong
