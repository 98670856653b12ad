"""A server's fault is found and named; a server without one is called exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from erring_server import CHANGED_TOKEN, erring_server, other_token, scripted
from layerskip_models import DEMO_PATH
from running_server import running_server
from selfspec import SelfSpecGenerator
from selfspec.analysis.server_check import plan
from selfspec.analysis.server_check.checking import CheckSettings, check_server
from selfspec.analysis.server_check.client import ServedModel
from selfspec.analysis.server_check.findings import ServerFindings, WayFinding
from selfspec.analysis.server_check.plan import EXAMPLE_PROMPTS
from selfspec.analysis.server_check.screen import finding_lines
from selfspec.cli.main import app

PROMPTS = ("one", "two and more", "three")
SEVERAL: dict[str, Any] = {"prompts": PROMPTS, "companies": (2, 3), "max_tokens": 12, "timeout_seconds": 20.0}
FEW: dict[str, Any] = {**SEVERAL, "prompts": PROMPTS[:2], "companies": (2,), "max_tokens": 8}
"""Enough to see a fault: about half as many requests."""


def check(*faults: str, plain: bool = False, **settings: Any) -> ServerFindings:
    with erring_server(*faults) as server:
        found = check_server(
            ServedModel(url=server.url, model="fast"),
            ServedModel(url=server.url, model="plain") if plain else None,
            CheckSettings(**{**FEW, **settings}),
        )
        assert len(server.bodies) == found.requests <= CheckSettings(**{**FEW, **settings}).num_requests(plain)
        return found


def named(found: ServerFindings, section: str, name: str) -> WayFinding:
    (way,) = [way for way in found.ways if (way.section, way.name) == (section, name)]
    return way


def differing(found: ServerFindings) -> set[tuple[str, str]]:
    return {(way.section, way.name) for way in found.ways if way.differing}


IN_COMPANY = {("greedy", "2 at once"), ("greedy", "2 at once, streamed"), ("greedy", "2 at once, logprobs")}
IN_COMPANIES = {("greedy", "2 at once"), ("greedy", "2 at once, streamed"), ("greedy", "3 at once")} | {
    ("greedy", "3 at once, streamed"), ("greedy", "3 at once, logprobs")
}  # fmt: skip


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_without_faults_is_exact(endpoint: Any) -> None:
    found = check(plain=True, endpoint=endpoint, expect_seeds=True, **SEVERAL)
    assert (found.verdict, found.endpoint, found.seed_matters) == ("exact", endpoint, True)
    assert found.company_overlapped is True
    assert all(way.compared == len(PROMPTS) and not way.failed for way in found.ways)
    assert [score.tokens for score in found.logprobs] == [len(PROMPTS) * SEVERAL["max_tokens"]] * 2


def test_the_number_of_requests_is_stated_beforehand() -> None:
    """3 prompts. Alone: 4 greedy, 2 stop, 4 seeded. At once: 2 by 2, which takes 4, for greedy twice and seeded once; 3 by 3
    for greedy three times, stop and seeded once. Without speculation 3 alone, 2 by 2, 3 by 3. And 2 to choose the route."""
    assert CheckSettings(**SEVERAL).num_requests(plain=False) == 10 * 3 + 3 * 4 + 5 * 3 + 2
    assert CheckSettings(**SEVERAL).num_requests(plain=True) == 59 + 3 * 3 + 4 + 3


@pytest.mark.parametrize(
    ("endpoint", "size", "ways"), [("completions", SEVERAL, IN_COMPANIES), ("chat", FEW, IN_COMPANY)]
)
def test_a_token_changed_in_company_is_found_with_its_place(
    endpoint: Any, size: dict[str, Any], ways: set[tuple[str, str]]
) -> None:
    found = check("company", endpoint=endpoint, **size)
    assert found.verdict == "differs"
    assert differing(found) == ways
    (first, *_) = named(found, "greedy", f"{max(size['companies'])} at once").partings
    tokens = scripted(PROMPTS[first.prompt], None, size["max_tokens"])
    fork = first.fork
    assert (fork.token, fork.expected, fork.got) == (5, tokens[CHANGED_TOKEN], other_token(tokens[CHANGED_TOKEN]))
    assert (fork.expected_logprob, fork.got_logprob, fork.near_tie) == (-0.5, -3.5, False)
    start = len("".join(tokens[:CHANGED_TOKEN]))
    assert (
        start < fork.character <= start + 4
    )  # the words differ after the space at the latest in their fourth character


def test_near_ties_are_a_verdict_of_their_own() -> None:
    found = check("company tie")
    assert (found.verdict, differing(found)) == ("near-ties", IN_COMPANY)
    assert all(way.near_ties == way.differing for way in found.ways)
    assert check("company tie", near_tie=0.05).verdict == "differs"


def test_without_logprobs_no_fork_is_called_a_near_tie() -> None:
    found = check("company tie", "no logprobs")
    assert found.verdict == "differs"
    (first, *_) = named(found, "greedy", "2 at once").partings
    assert (first.fork.token, first.fork.near_tie) == (None, None)
    assert [score.unsupported for score in found.logprobs] == ["the server gives none"]
    assert finding_lines(found)[-1].endswith("and no log probabilities say whether at a near-tie")


def test_logprobs_of_the_choice_say_nothing_of_near_ties() -> None:
    found = check("company tie", "chosen only")
    assert found.verdict == "differs"
    assert {parting.fork.near_tie for way in found.ways for parting in way.partings} == {None}
    assert "all are 0" in str(found.logprobs[0].unsupported)


def test_a_text_that_ends_early_in_company_is_found() -> None:
    found = check("company ends")
    (first, *_) = named(found, "greedy", "2 at once").partings
    assert (found.verdict, first.fork.token, first.fork.got) == ("differs", CHANGED_TOKEN, "")


@pytest.mark.parametrize(("fault", "kept"), [("no stop", False), ("stop kept", True)])
def test_a_stop_that_does_not_cut_is_found(fault: str, kept: bool) -> None:
    found = check(fault)
    assert found.verdict == "differs"
    assert {section for section, _ in differing(found)} == {"stops"}
    for name in ("alone", "alone, streamed", "2 at once, streamed"):
        way = named(found, "stops", name)
        assert way.compared == way.differing == len(FEW["prompts"])
        assert finding_lines(found)[-1] == "verdict: differs: stop strings do not cut exactly"
        assert all(fault.stop in fault.got and fault.got.endswith(fault.stop) == kept for fault in way.stop_faults)


def test_a_stream_that_loses_a_piece_is_found() -> None:
    found = check("streams lose")
    assert found.verdict == "differs"
    assert differing(found) >= {
        ("greedy", "alone, streamed"),
        ("greedy", "2 at once, streamed"),
        ("seeds", "alone, streamed"),
    }
    assert not named(found, "greedy", "2 at once").differing


def test_logprobs_that_move_in_company_are_found() -> None:
    found = check("logprobs")
    assert (found.verdict, differing(found)) == ("differs", set())
    (score,) = found.logprobs
    assert score.largest_difference == pytest.approx(0.5)
    assert score.prompt in range(len(FEW["prompts"])) and score.token in range(FEW["max_tokens"])
    assert check("logprobs", logprob_tolerance=0.6).verdict == "exact"


def test_speculation_that_changes_a_token_is_found() -> None:
    found = check("speculation", plain=True)
    assert (found.verdict, differing(found)) == ("differs", {("speculation", "on beside off, alone")})
    assert named(found, "speculation", "on beside off, alone").differing == len(FEW["prompts"])
    assert check("speculation").verdict == "exact"  # by itself it is the same every time


def test_seeds_count_only_where_they_are_promised() -> None:
    found = check("drifts")
    assert found.verdict == "exact"
    assert differing(found) == {("seeds", "2 at once")}
    assert check("drifts", expect_seeds=True).verdict == "differs"


@pytest.mark.parametrize("fault", ["one text", "no seeds"])
def test_a_seed_without_effect_is_no_promise_kept(fault: str) -> None:
    found = check(fault, expect_seeds=True)
    assert found.verdict == "incomplete"
    assert found.seed_matters is (False if fault == "one text" else None)
    assert check(fault).verdict == "exact"


def test_a_busy_server_is_not_called_exact() -> None:
    found = check("busy")
    assert (found.verdict, differing(found)) == ("incomplete", set())
    way = named(found, "greedy", "2 at once")
    assert (way.busy, way.failed, way.compared) == (2, 0, 0)


@pytest.mark.parametrize("fault", ["breaks", "breaks off"])
def test_streams_that_fail_are_counted(fault: str) -> None:
    found = check(fault)
    assert found.verdict == "incomplete"
    way = named(found, "greedy", "alone, streamed")
    assert (way.failed, way.compared) == (len(FEW["prompts"]), 0)
    assert way.error
    assert named(found, "greedy", "2 at once").compared == len(FEW["prompts"])


def test_a_server_that_works_on_one_request_after_another_is_said_to() -> None:
    found = check("serial")
    assert (found.verdict, found.company_overlapped) == ("exact", False)
    assert any("one request after another" in line for line in finding_lines(found))


def test_chats_are_asked_where_there_are_no_completions() -> None:
    assert check("no completions").endpoint == "chat"


def test_a_server_that_writes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="gives no text for model 'fast': empty texts"):
        check("silent")


def test_our_server_is_exact() -> None:
    """Also for a chat, with seeds, and beside decoding without speculation."""
    with running_server(SelfSpecGenerator.from_pretrained(DEMO_PATH), batch_size=8) as server:
        served = ServedModel(url=f"{server.base}/v1", model="demo")
        plain = ServedModel(url=served.url, model="demo", fields={"policy": "ar"})
        for endpoint, companies in (("completions", (2, 5)), ("chat", (5,))):
            settings = CheckSettings(
                prompts=EXAMPLE_PROMPTS[:5],
                max_tokens=24,
                companies=companies,
                endpoint=endpoint,  # type: ignore[arg-type]
                expect_seeds=True,
            )
            found = check_server(served, plain, settings)
            assert found.verdict == "exact", finding_lines(found)
            assert (found.company_overlapped, found.seed_matters) == (True, True)
            assert all(way.compared == 5 for way in found.ways if way.section != "stops")
            assert all(score.tokens > 100 and score.largest_difference <= 1e-4 for score in found.logprobs)


def verify(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", *arguments])


def test_the_command_prints_one_screen_or_json(tmp_path: Any) -> None:
    files = []
    for index, prompt in enumerate(FEW["prompts"]):
        (tmp_path / f"{index}.txt").write_text(prompt, encoding="utf-8")
        files += ["--file", str(tmp_path / f"{index}.txt")]
    few = [*files, "--max-new-tokens", "8", "--company", "2"]
    with erring_server("speculation") as server:
        result = verify("--server", server.url.removesuffix("/v1"), *few)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0].startswith(f"fast at {server.url} (completions): ")
        assert lines[-1] == "verdict: exact: no text depends on how it was asked for"
        assert len(lines) <= 40
        assert "requests of at most 8 tokens" in result.stderr
        result = verify("--server", server.url, "--plain-model", "plain", "--json", *few)
        assert result.exit_code == 1
        found = json.loads(result.stdout)
        (way,) = [way for way in found["ways"] if way["section"] == "speculation"]
        assert (found["verdict"], way["share_differing"], way["partings"][0]["fork"]["token"]) == ("differs", 1.0, 5)
    with erring_server("company tie") as server:
        result = verify("--server", server.url, *few)
        assert (result.exit_code, "near-tie" in result.stdout) == (1, True)
        assert verify("--server", server.url, "--allow-near-ties", *few).exit_code == 0


def test_fields_and_example_prompts_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "EXAMPLE_PROMPTS", EXAMPLE_PROMPTS[-2:])
    with erring_server() as server:
        result = verify(
            "--server", server.url, "--model", "other", "--fields", '{"top_k": 7}', "--plain-fields", '{"off": true}',
            "--max-new-tokens", "4", "--company", "2", "--chat",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert {(body["model"], body["top_k"], body.get("off")) for body in server.bodies} == {
            ("other", 7, None), ("other", 7, True)
        }  # fmt: skip
        assert {body["messages"][0]["content"] for body in server.bodies} == {*EXAMPLE_PROMPTS[-2:]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--server", "localhost:8000"],
            "--server must be an address such as http://127.0.0.1:8000/v1, got 'localhost:8000'",
        ),
        (["--server", "http://127.0.0.1:9/v1"], "is a server running there?"),
        (["--server", "http://127.0.0.1:9/v1", "demo"], "--server checks a running server: leave out the checkpoint"),
        (["--server", "http://127.0.0.1:9/v1", "--draws", "0"], "--server checks a running server"),
        (["--server", "http://127.0.0.1:9/v1", "--max-new-tokens", "9999"], "--max-new-tokens must be at most 4096"),
        (["--server", "http://127.0.0.1:9/v1", "--model", "m", "--fields", "x"], "--fields is not JSON"),
        (
            ["--server", "http://127.0.0.1:9/v1", "--model", "m", "--plain-fields", "3"],
            "--plain-fields must be a JSON object",
        ),
        (["--server", "http://127.0.0.1:9/v1", "--model", "m", "--plain-model", "m"], "is the one that is checked"),
        (["--server", "http://127.0.0.1:9/v1", "--model", "m"], "gives no text for model 'm': APIConnectionError"),
        (["--chat"], "--chat is for a server: add --server URL"),
        (["--model", "m"], "--model is for a server: add --server URL"),
        (["--plain-model", "m"], "--plain-model is for a server: add --server URL"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = verify(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[-1]
