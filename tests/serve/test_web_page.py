"""The page at `/`: what it may load, and one answer in a real browser (skipped where there is none)."""

from __future__ import annotations

import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from layerskip_models import DEMO_PATH
from running_server import running_server
from selfspec import SelfSpecGenerator
from selfspec.serve.app import content_policy

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGE = files("selfspec.serve").joinpath("page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def offline() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH, policy="auto:cost=layers")


@pytest.fixture(scope="module")
def address(offline: SelfSpecGenerator) -> Iterator[str]:
    with running_server(offline, chat_template=None) as found:
        yield found.base


@pytest.fixture
def page(address: str) -> Iterator[Any]:
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


def test_page_refers_to_no_other_host_and_never_parses_html() -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", PAGE))
    assert addresses <= {"http://www.w3.org"}  # the namespace of SVG
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser|localStorage", PAGE
    )
    assert len(re.findall(r"<(?:script|style|link)\b", PAGE)) == 3  # one of each
    assert not re.search(r"\s(?:on\w+|style)\s*=\s*[\"']", PAGE)  # the content policy forbids them


def test_page_is_served_with_a_policy_that_lets_it_run_nothing_else(address: str) -> None:
    with urllib.request.urlopen(address) as response:
        assert response.read().decode() == PAGE
        policy = response.headers["Content-Security-Policy"]
    assert policy == content_policy(PAGE)
    assert "'unsafe" not in policy and policy.startswith("default-src 'none'")
    assert content_policy(PAGE.replace("use strict", "use nothing")) != policy


def test_continuation_with_drafts_in_colour(offline: SelfSpecGenerator, page: Any) -> None:
    """No chat template: the page continues texts. What it shows is the text, and its drafts add up to the figures."""
    prompt = "def fibonacci(n):\n"
    assert page.is_checked("[value=completion]") and page.is_disabled("[value=chat]")
    page.fill("#prompt", prompt)
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".answer:not(.busy)")
    plain = offline.generate(prompt, max_new_tokens=200, do_sample=False, num_speculations=0)
    assert "".join(page.locator(".answer .text > span:not(.rejected)").all_text_contents()) == plain.text
    assert page.text_content(".asked") == prompt
    for fate in ("accepted", "rejected", "corrected", "bonus"):
        assert page.locator(f".answer .{fate}").count() > 0
    figures = dict(zip(*(page.locator(f".figures {tag}").all_text_contents() for tag in ("dt", "dd"))))
    bars = page.locator(".rounds").get_attribute("aria-label") or ""
    accepted, drafted, rounds = map(int, re.findall(r"\d+", bars))
    assert figures["accepted"] == f"{round(100 * accepted / drafted)} % of {drafted}"
    assert figures["tokens/round"] == f"{(plain.stats.num_new_tokens - 1) / rounds:.2f}"
    page.uncheck("#show-drafts")
    assert page.locator(".answer .rejected:visible").count() == 0


def test_each_run_of_a_comparison_reads_all_of_the_prompt(page: Any) -> None:
    """Else the second goes on from what the first has read, and its first token comes sooner. On a phone settings fold."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.is_visible("#policy")
    page.check("#compare")
    page.fill("#prompt", "Once upon a time")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".verdict")
    assert not page.is_visible("#policy")
    first, second = sent
    assert (first.pop("cache_salt") != second.pop("cache_salt")) and {**first, "policy": "ar"} == second
