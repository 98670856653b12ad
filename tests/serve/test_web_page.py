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
    from playwright.sync_api import Browser, Page, Route

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


def test_copied_drafts_have_a_colour_figures_and_a_part_of_the_bars_of_their_own(demo, open_page):
    """What the model is going to say is what the server copies from: the same text, most of it copied."""
    plain = demo.generate(PROMPT, max_new_tokens=60, do_sample=False, num_speculations=0)
    with running_server(demo, chat_template=None, copy_from=(PROMPT + plain.text,)) as server:
        page = open_page(server.base)
        page.fill("#max-tokens", "60")
        page.fill("#policy", "auto:cost=layers")
        ask(page, PROMPT)
        finished(page)
        assert shown_text(page) == plain.text
        usage = dict.fromkeys(("drafted", "accepted", "copied", "copied_accepted"), 0)
        with server.client() as client:
            body = {"policy": "auto:cost=layers"}
            answer = client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=60, temperature=0, extra_body=body
            )
            usage = {name: answer.usage.model_extra[name] for name in usage}
    assert page.locator(".answer .copied").count() > 5
    colours = {
        fate: page.locator(f"#legend .{fate}").evaluate("found => getComputedStyle(found).color")
        for fate in ("accepted", "copied", "rejected", "corrected", "bonus")
    }
    assert len(set(colours.values())) == len(colours)
    shown = page.locator(".answer .copied").first.evaluate("found => getComputedStyle(found).color")
    assert shown == colours["copied"]
    figures = figures_of(page)
    assert page.locator(".figures dt:visible").count() == 6

    def share(right: int, whole: int) -> str:
        return f"{round(100 * right / whole)} % of {whole}" if whole else "no drafts"

    drafted, accepted = usage["drafted"] - usage["copied"], usage["accepted"] - usage["copied_accepted"]
    assert figures["of copied"] == share(usage["copied_accepted"], usage["copied"])
    assert figures["of drafted"] == share(accepted, drafted)
    titles = [bar.get_attribute("title") or "" for bar in page.locator(".rounds i").all()]
    told = [tuple(map(int, found)) for title in titles for found in re.findall(r"(\d+) of (\d+) copied", title)]
    assert (sum(right for right, _ in told), sum(whole for _, whole in told)) == (
        usage["copied_accepted"],
        usage["copied"],
    )


def test_bars_of_rounds_that_copy(address, open_page):
    """By hand: a copy that was cut short by verification, a copy with drafts behind it, and a round of drafts alone."""
    rounds = [
        {"exit_layer": None, "drafted": 4, "accepted": 3, "copied": 4},
        {"exit_layer": 2, "drafted": 5, "accepted": 4, "copied": 3},
        {"exit_layer": 2, "drafted": 2, "accepted": 1, "copied": 0},
        {"exit_layer": None, "drafted": 0, "accepted": 0, "copied": 0},
    ]
    pieces = [{"text": "copy", "fate": "accepted", "copied": True}, {"text": "draft", "fate": "accepted"}]
    log = {"pieces": pieces, "rounds": rounds, "tokens": 12, "seconds": 0.1}
    body = events(chunk("copydraft", selfspec=log)) + "data: [DONE]\n\n"
    page = open_page(address)
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, "Once")
    finished(page)
    assert page.locator(".answer .copied").all_text_contents() == ["copy"]
    assert page.locator(".answer .text .accepted").all_text_contents() == ["draft"]
    assert [bar.get_attribute("title") for bar in page.locator(".rounds i").all()] == [
        "3 of 4 copied tokens accepted",
        "3 of 3 copied tokens accepted; exit after layer 2: 1 of 2 drafts accepted",
        "exit after layer 2: 1 of 2 drafts accepted",
        "no draft",
    ]
    parts = page.locator(".rounds i").evaluate_all(
        """bars => bars.map(bar => {
          const [wrong, right] = ['::before', '::after'].map(part => getComputedStyle(bar, part));
          return [wrong.height, right.height, right.backgroundImage.match(/[\\d.]+px/)?.[0]].map(parseFloat);
        })"""
    )
    unit = parts[0][0]  # one draft that was not accepted
    assert unit > 0
    for found, (wrong, right, copied) in zip(parts, [(1, 3, 3), (1, 4, 3), (1, 1, 0)]):
        assert found == pytest.approx([wrong * unit, right * unit, copied * unit], rel=0.02)
    figures = figures_of(page)
    assert (figures["accepted"], figures["of copied"], figures["of drafted"]) == (
        "73 % of 11",
        "86 % of 7",
        "50 % of 4",
    )


def test_side_by_side_with_plain_decoding(address, open_page):
    page = open_page(address)
    page.check("#compare")
    page.fill("#max-tokens", "60")
    ask(page, PROMPT)
    page.wait_for_selector(".verdict")
    finished(page, 2)
    assert shown_text(page, 0) == shown_text(page, 1) != ""
    assert re.fullmatch(
        r"\d+\.\d\d× the speed of plain decoding in one run of each, the same text", page.inner_text(".verdict")
    )
    assert page.locator(".answer .head").nth(1).inner_text().startswith("plain decoding")
    assert page.locator(".answer").nth(1).locator(".accepted, .rejected").count() == 0
    left, right = (page.locator(".answer").nth(index).bounding_box() for index in (0, 1))
    assert left and right and left["y"] == right["y"] and left["x"] < right["x"]


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


def test_conversation_remembers_earlier_turns(demo, open_page):
    bodies = []
    with running_server(demo) as server:
        page = open_page(server.base)
        assert page.is_checked("[value=chat]")
        page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
        page.fill("#max-tokens", "20")
        page.fill("#system", "Be brief.")
        for number, question in enumerate(("How many apples?", "And pears?"), 1):
            page.fill("#prompt", question)
            page.press("#prompt", "Shift+Enter")
            assert page.locator(".answer").count() == number - 1
            page.press("#prompt", "Enter")
            finished(page, number)
        first = shown_text(page, 0)
        page.click("#fresh")
        assert page.locator(".answer").count() == 0
    assert [(m["role"], m["content"]) for m in bodies[1]["messages"]] == [
        ("system", "Be brief."),
        ("user", "How many apples?"),
        ("assistant", first),
        ("user", "And pears?"),
    ]


def test_text_of_the_model_is_never_html(address, open_page):
    nasty = "<img src=x onerror=\"document.title='caught'\"><script>document.title='caught'</script>\u202e&amp;"
    body = events(chunk(nasty), chunk("", selfspec=drafts(nasty))) + "data: [DONE]\n\n"
    page = open_page(address)
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, nasty)
    finished(page)
    assert page.inner_text(".asked").startswith("<img")
    assert shown_text(page) == nasty
    assert page.locator(".answer .rejected").text_content() == nasty
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "demo · selfspec"


def drafts(rejected: str) -> dict:
    rounds = [{"exit_layer": 2, "drafted": 1, "accepted": 0}]
    return {"pieces": [{"text": rejected, "fate": "rejected"}], "rounds": rounds, "tokens": 1, "seconds": 0.1}


def problem(page: Page) -> str:
    page.wait_for_selector(".problem")
    assert page.locator(".answer.busy").count() == 0 and page.is_enabled("#send")
    return page.inner_text(".problem p")


def test_errors_are_told_plainly_and_can_be_tried_again(address, open_page):
    page = open_page(address)
    full = json.dumps({"error": {"message": "full", "type": "rate_limit_error"}})
    page.route(
        "**/v1/completions", lambda route: route.fulfill(status=429, headers={"Retry-After": "7"}, body=full), times=1
    )
    ask(page, "Once")
    assert problem(page) == "The server is full: as many requests wait as it lets wait. Try again in 7 s."
    page.click(".problem button")
    finished(page)
    assert page.locator(".problem").count() == 0 and shown_text(page)

    def break_off(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=events(chunk("half a")))

    page.route("**/v1/completions", break_off, times=1)
    ask(page, "Once")
    assert "connection ended before the answer did" in problem(page)
    assert shown_text(page, 1) == "half a"
    page.click("#fresh")
    ask(page, "word " * 3000)
    assert "context" in problem(page)  # the server's own message: too long
    page.click("#fresh")
    page.fill("#policy", "nonsense")
    ask(page, "Once")
    assert "nonsense" in problem(page)


def test_server_that_is_gone_is_told_and_found_again(address, open_page):
    page = open_page(address)
    page.route("**/v1/**", lambda route: route.abort())
    ask(page, "Once")
    assert problem(page) == "The server does not answer. Is it still running?"
    assert page.inner_text("#status") == "no server"
    page.unroute("**/v1/**")
    page.wait_for_selector("#status[data-state=ready]")


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


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_in_both_widths_and_themes(address, open_page, width, scheme):
    page = open_page(address, width, color_scheme=scheme)
    assert page.locator("#policy").is_visible() == (width > 1000)
    page.check("#compare")
    ask(page, PROMPT + "    # a long comment without a single line break, as they come\n" + "x" * 200)
    page.wait_for_selector(".verdict")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("#send", "#stop", "#prompt", "#compare", "#fresh", "#theme"):
        box = page.locator(name).bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 900, name
    page.locator("#panel").evaluate("panel => { panel.open = true; }")
    assert (
        page.evaluate(
            CONTRAST, [".accepted", ".copied", ".rejected", ".corrected", ".bonus", ".note", ".figures dt", "h1"]
        )
        >= 4.5
    )
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


CONTRAST = """selectors => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = parse(color).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return parse(color)[3] === 0 ? back(element.parentElement) : color;
  };
  const contrasts = selectors.flatMap((selector) => [...document.querySelectorAll(selector)].map((element) => {
    const pair = [light(getComputedStyle(element).color), light(back(element))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  }));
  return Math.min(...contrasts);
}"""
"""The smallest contrast of text to what is behind it, as WCAG 2 defines it."""


def test_keyboard_reaches_everything(address, open_page):
    page = open_page(address)
    assert page.evaluate("document.activeElement.id") == "prompt"
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.tagName")
        )
    assert {"fresh", "theme", "policy", "max-tokens", "temperature", "top-p", "seed", "show-drafts"} <= reached
    assert {"SUMMARY", "mode", "log", "prompt", "compare", "send"} <= reached
