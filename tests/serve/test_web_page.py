"""The page at `/`: what it may load, and what it does in a real browser (skipped where there is none)."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest

from layerskip_models import DEMO_PATH
from running_server import RunningServer, running_server
from selfspec import SelfSpecGenerator
from selfspec.serve.web_page import content_policy

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROMPT = "def fibonacci(n):\n"
PAGE = files("selfspec.serve").joinpath("page.html").read_text(encoding="utf-8")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def demo() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH, policy="auto:cost=layers")


@pytest.fixture(scope="module")
def server(demo: SelfSpecGenerator) -> Iterator[RunningServer]:
    """One without a chat template."""
    with running_server(demo, chat_template=None) as found:
        yield found


@pytest.fixture
def address(server: RunningServer) -> str:
    return server.base


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright and a browser")
    own = next(filter(None, map(shutil.which, BROWSERS)), None)
    sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium refuses root its sandbox
    with api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=own, args=sandbox)
        except api.Error as error:
            pytest.skip(f"no browser could be started: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page, and fails the test if anything went wrong in it, a breach of its content policy included."""
    opened, wrong = [], []

    def look(message: object) -> None:
        text = getattr(message, "text", "")
        if getattr(message, "type", "") == "error" and "Failed to load resource" not in text:
            wrong.append(text)

    def start(address: str, width: int = 1400, ready: bool = True, **options: object) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        opened.append(page)
        page.set_default_timeout(20_000)
        page.on("console", look)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        if ready:
            page.wait_for_selector("#status[data-state=ready]")
        return page

    yield start
    for page in opened:
        page.close()
    assert not wrong


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Control+Enter")


def finished(page: Page, answers: int = 1) -> None:
    page.wait_for_function(
        "count => document.querySelectorAll('.answer:not(.busy)').length === count && $('stop').disabled", arg=answers
    )


def shown_text(page: Page, answer: int = 0) -> str:
    """Of an answer on the page, without the rejected drafts."""
    pieces = page.locator(".answer").nth(answer).locator(".text > span:not(.rejected)").all_text_contents()
    return "".join(pieces)


def figures_of(page: Page) -> dict[str, str]:
    """Of the first answer, hidden ones as well."""
    names, values = (page.locator(f".figures {tag}").all_text_contents() for tag in ("dt", "dd"))
    return dict(zip(names, values))


def events(*chunks: dict) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)


def chunk(text: str, **more: object) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}


def test_page_refers_to_no_other_host_and_never_parses_html():
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", PAGE))
    assert addresses <= {"http://www.w3.org"}  # the namespace of SVG
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser|localStorage", PAGE
    )
    assert len(re.findall(r"<(?:script|style|link)\b", PAGE)) == 3  # one of each
    assert not re.search(r"\s(?:on\w+|style)\s*=\s*[\"']", PAGE)  # the content policy forbids them


def test_page_is_served_with_a_policy_that_lets_it_run_nothing_else(address):
    with urllib.request.urlopen(address) as response:
        assert response.read().decode() == PAGE
        policy = response.headers["Content-Security-Policy"]
    assert policy == content_policy(PAGE)
    assert "'unsafe" not in policy and policy.startswith("default-src 'none'")
    assert content_policy(PAGE.replace("use strict", "use nothing")) != policy


def test_continuation_with_drafts_in_colour(address, demo, open_page):
    """No chat template: the page continues texts. What it shows is the text, and its drafts add up to the figures."""
    page = open_page(address)
    assert page.is_checked("[value=completion]") and page.is_disabled("[value=chat]")
    ask(page, PROMPT)
    finished(page)
    plain = demo.generate(PROMPT, max_new_tokens=200, do_sample=False, num_speculations=0)
    assert shown_text(page) == plain.text
    assert page.text_content(".asked") == PROMPT
    for fate in ("accepted", "rejected", "corrected", "bonus"):
        assert page.locator(f".answer .{fate}").count() > 0
    assert page.locator(".rejected").nth(1).is_visible()
    assert page.locator(".figures dt:visible").count() == 4 or page.locator(".answer .copied").count()
    figures = figures_of(page)
    bars = page.locator(".rounds").get_attribute("aria-label") or ""
    accepted, drafted, rounds = map(int, re.findall(r"\d+", bars))
    assert figures["accepted"] == f"{round(100 * accepted / drafted)} % of {drafted}"
    assert page.locator(".rounds i").count() == rounds
    assert figures["tokens/round"] == f"{(plain.stats.num_new_tokens - 1) / rounds:.2f}"
    assert float(figures["tokens/s"]) > 0 and figures["first token"].endswith(" ms")
    page.uncheck("#show-drafts")
    assert page.locator(".answer .rejected:visible").count() == 0
    assert page.locator("#legend").is_hidden()


def test_stop_by_key_keeps_what_has_come_and_frees_the_server(server, open_page):
    page = open_page(server.base)
    page.fill("#max-tokens", "1900")
    page.fill("#policy", "ar")
    ask(page, "Once upon a time")
    page.wait_for_selector(".answer .target")
    page.keyboard.press("Escape")
    finished(page)
    assert page.inner_text(".ended").endswith(", stopped")
    assert len(shown_text(page)) > 0
    page.fill("#max-tokens", "5")
    ask(page, "Once")
    finished(page, 2)
    assert server.metric("cancelled_texts_total") == 1


def test_text_of_the_model_is_never_html(address, open_page):
    nasty = "<img src=x onerror=\"document.title='caught'\"><script>document.title='caught'</script>\u202e&amp;"
    shown = {
        "pieces": [{"text": nasty, "fate": "rejected"}],
        "rounds": [{"exit_layer": 2, "drafted": 1, "accepted": 0}],
        "tokens": 1,
        "seconds": 0.1,
    }
    body = events(chunk(nasty), chunk("", selfspec=shown)) + "data: [DONE]\n\n"
    page = open_page(address)
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, nasty)
    finished(page)
    assert page.inner_text(".asked").startswith("<img")
    assert shown_text(page) == nasty
    assert page.locator(".answer .rejected").text_content() == nasty
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "demo · selfspec"


def test_key_is_asked_for_where_the_server_has_one(demo, open_page):
    with running_server(demo, api_key="secret") as server:
        page = open_page(server.base, ready=False)
        page.fill("#key", "wrong")
        page.press("#key", "Tab")
        page.wait_for_function("() => $('status').textContent === 'needs a key'")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#status[data-state=ready]")
        page.fill("#max-tokens", "5")
        ask(page, "Once")
        finished(page)
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(server.base + "/v1/models")
        refused.value.close()
