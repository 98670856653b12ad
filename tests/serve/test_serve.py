"""The real `openai` client against a server with the demo checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import openai
import pytest
import torch
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from layerskip_models import DEMO_PATH
from running_server import RunningServer, ask, asking, post, refusal, running_server, wait_until
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.results import StepOutput
from selfspec.serve.api_requests import CompletionRequest
from selfspec.serve.api_responses import _shown_in_completions
from selfspec.serve.running import open_socket
from selfspec.serve.serve_options import ServeOptions
from selfspec.serve.translation import ServedPolicies, Translator

ROOT = Path(__file__).parents[2]
CODE = "def fibonacci(n):\n"
SUM: list[Any] = [{"role": "user", "content": "Tom has 3 apples and buys 4. How many has he?"}]
PLAIN_SUM = "Question: Tom has 3 apples and buys 4. How many has he?\nAnswer:"
REPEATING = "auto:cost=layers"
ASK: dict[str, Any] = {"model": "demo", "prompt": CODE, "temperature": 0}
CHAT: dict[str, Any] = {"model": "demo", "messages": SUM, "temperature": 0}


def test_a_completion_is_the_offline_text(client: OpenAI, offline: SelfSpecGenerator) -> None:
    """For a prompt as text and as ids, whole and in pieces; with the prompt before it if asked."""
    assert offline.tokenizer is not None
    expected = offline.generate(CODE, max_new_tokens=40)
    ids = offline.tokenizer(CODE)["input_ids"]
    for prompt, extra in ((CODE, {"policy": "ls:3-4"}), (ids, {}), ([ids], {})):
        options = {**ASK, "prompt": prompt, "max_tokens": 40, "extra_body": extra}
        answer = client.completions.create(**options)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (expected.text, "length")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (10, 40, 50)
        found = answer.usage.model_extra or {}
        assert 0 <= found["accepted"] <= found["drafted"]
        # Every round brings one token beside the accepted drafts, and the prompt's end brings the first.
        assert found["accepted"] + found["rounds"] + 1 >= 40
        *chunks, last = client.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, echo=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == f"{CODE}{expected.text}"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert not last.choices and last.usage is not None and last.usage.completion_tokens == 40
    assert client.completions.create(**ASK, max_tokens=5, echo=True).choices[0].text.startswith(CODE)
    assert client.completions.create(model="demo", prompt=CODE).usage.completion_tokens <= 16  # type: ignore[union-attr]


def test_the_printed_example_works(
    server: RunningServer, offline: SelfSpecGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?:^    .*\n)+", page[page.index("    from openai") :], re.MULTILINE)[0]
    exec(textwrap.dedent(lines).replace("http://127.0.0.1:8000", server.base), {})
    assert (offline.generate(CODE, max_new_tokens=40).text or "") in capsys.readouterr().out


@pytest.mark.parametrize("stop", [None, " representation repre"])
@pytest.mark.parametrize(
    "fields", [{"policy": "ls:3-4"}, {"policy": "copy:6"}, {"policy": "ls:3-4", "seed": 2}], ids=str
)
def test_shown_drafts_keep_step_with_the_text(client: OpenAI, fields: dict[str, Any], stop: str | None) -> None:
    """Also where text is held back because a stop string may have begun, and where it is cut there.

    Copied pieces say so, and stay accepted for those who do not look. The rounds add up to the usage.
    """
    asked: dict[str, Any] = {**ASK, "max_tokens": 40, "stop": stop, "extra_body": fields}
    asked |= {"temperature": 1} if "seed" in fields else {}
    asked |= {"prompt": f"{CODE} representation representation"} if "copy" in fields["policy"] else {}
    whole = client.completions.create(**asked)
    usage = {"stream_options": {"include_usage": True}, "extra_body": {**fields, "show_drafts": True}}
    *chunks, last = client.completions.create(**{**asked, **usage}, stream=True)
    shown = [(chunk.model_extra or {})["selfspec"] for chunk in chunks]
    for field, chunk in zip(shown, chunks):
        kept = [piece["text"] for piece in field["pieces"] if piece["fate"] != "rejected"]
        assert "".join(kept) == chunk.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    rounds = [one for field in shown for one in field["rounds"]]
    pieces = [piece for field in shown for piece in field["pieces"]]
    assert last.usage is not None
    used = {"tokens": last.usage.completion_tokens, **(last.usage.model_extra or {})}
    assert sum(field["tokens"] for field in shown) == used["tokens"] <= 41
    assert [sum(one[name] for one in rounds) for name in ("drafted", "accepted", "copied")] == [
        used["drafted"], used["accepted"], used["copied"],
    ]  # fmt: skip
    assert len(rounds) == used["rounds"]
    seconds, fates = [field["seconds"] for field in shown], {piece["fate"] for piece in pieces}
    assert seconds == sorted(seconds) and "accepted" in fates and ("rejected" in fates or stop)
    copied = [piece for piece in pieces if "copied" in piece]
    assert bool(copied) == (fields["policy"] == "copy:6")
    assert all(piece["copied"] is True and piece["fate"] == "accepted" for piece in copied)


@pytest.mark.parametrize("stops", ["return", ["no such text", "sentation\n", " representation repre"]])
def test_stop_strings_end_the_text_and_are_not_in_it(
    client: OpenAI, offline: SelfSpecGenerator, stops: str | list[str]
) -> None:
    """The tokens are those of transformers' StopStringCriteria; the text ends before the first stop string."""
    options: dict[str, Any] = {**ASK, "max_tokens": 200, "stop": stops}
    expected = offline.generate(CODE, max_new_tokens=200, stop_strings=stops)
    assert expected.stop_reason == "stop_string" and expected.text is not None
    listed = [stops] if isinstance(stops, str) else stops
    cut = min(place for stop in listed if (place := expected.text.find(stop)) >= 0)
    answer = client.completions.create(**options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text[:cut], "stop")
    assert answer.usage is not None and answer.usage.completion_tokens == expected.stats.num_new_tokens
    pieces = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == expected.text[:cut]


def test_choices_are_seeded_one_after_the_other(client: OpenAI) -> None:
    """Each is the text of a single request, which it is in company here."""
    options: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 1.0}
    both = client.completions.create(**options, prompt=[CODE, "Once"], n=2, seed=5)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (12, 48)
    for choice, prompt in zip(both.choices, [CODE, CODE, "Once", "Once"]):
        single = client.completions.create(**options, prompt=prompt, seed=5 + choice.index)
        assert choice.text == single.choices[0].text
    chat: dict[str, Any] = {"model": "demo", "messages": SUM, "n": 2, "seed": 1, "max_tokens": 10, "temperature": 1}
    pieces = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**chat, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    whole = client.chat.completions.create(**chat)
    assert [choice.message.content for choice in whole.choices] == [*pieces.values()]


def test_biases_and_penalties(client: OpenAI, offline: SelfSpecGenerator) -> None:
    options: dict[str, Any] = {**ASK, "max_tokens": 12}
    forced = client.completions.create(**options, logit_bias={"300": 100})
    assert offline.tokenizer is not None
    assert forced.choices[0].text == offline.tokenizer.decode([300] * 12)
    plain = client.completions.create(**options)
    options |= {"presence_penalty": 2, "frequency_penalty": 2}
    penalised = client.completions.create(**options)
    assert plain.choices[0].text.count(" representation") > penalised.choices[0].text.count(" representation")
    unspeculative = client.completions.create(**options, extra_body={"policy": "ar"})
    assert penalised.choices[0].text == unspeculative.choices[0].text


def test_logprobs_are_the_models(client: OpenAI, offline: SelfSpecGenerator) -> None:
    reference = LlamaForCausalLM.from_pretrained(DEMO_PATH, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_PATH)
    result = offline.generate(PLAIN_SUM, max_new_tokens=12)
    with torch.no_grad():
        logits = reference(result.sequences).logits[0, result.stats.num_prompt_tokens - 1 : -1].float()
    expected = logits.log_softmax(-1)
    best = expected.topk(3)
    options: dict[str, Any] = {**CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 3, "presence_penalty": 1e-9}
    whole = client.chat.completions.create(**options).choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert [entry.token for entry in whole.content] == [tokenizer.decode([t]) for t in result.new_tokens]
    for row, entry in enumerate(whole.content):
        assert bytes(entry.bytes or []).decode() == entry.token
        assert entry.logprob == pytest.approx(float(expected[row, result.new_tokens[row]]), abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values[row].tolist(), abs=1e-3)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert streamed == whole.content
    found = client.completions.create(**{**ASK, "prompt": PLAIN_SUM}, max_tokens=12, logprobs=3).choices[0].logprobs
    assert found is not None and found.tokens is not None
    assert found.token_logprobs == [entry.logprob for entry in whole.content]
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(12)]


def test_answers_have_the_fields_of_openais_types_in_their_order(server: RunningServer) -> None:
    """What the client's own types make of an answer is the answer."""
    chat: dict[str, Any] = {**CHAT, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
    text: dict[str, Any] = {"prompt": "x \u2603", "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True}
    for path, kind, body in (
        ("/v1/chat/completions", ChatCompletion, chat),
        ("/v1/chat/completions", ChatCompletion, {"messages": SUM, "max_tokens": 5}),
        ("/v1/completions", Completion, text),
        ("/v1/completions", Completion, {"prompt": ["a", "b"], "max_tokens": 5}),
    ):
        _, raw, _ = ask(server, "POST", path, body)
        made = kind.model_validate_json(raw) if kind is ChatCompletion else kind.model_construct(**json.loads(raw))
        assert in_order(made.model_dump_json(exclude_unset=True, warnings=False)) == in_order(raw)
        _, raw, _ = ask(server, "POST", path, {**body, "stream": True})
        for line in raw.decode().split("\n\n")[:-2] if kind is ChatCompletion else []:
            chunk = ChatCompletionChunk.model_validate_json(line[6:])
            assert in_order(chunk.model_dump_json(exclude_unset=True)) == in_order(line[6:])


def in_order(raw: str | bytes) -> Any:
    return json.loads(raw, object_pairs_hook=list)


def test_offsets_count_special_tokens_that_the_prompt_shows(server: RunningServer, offline: SelfSpecGenerator) -> None:
    assert offline.tokenizer is not None
    special = offline.tokenizer.eos_token
    body = {"prompt": f"x{special}yz", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    for stream in (False, True):
        text, names, offsets = "", list[str](), list[int]()
        _, raw, _ = ask(server, "POST", "/v1/completions", {**body, "stream": stream})
        events = [one[6:] for one in raw.decode().split("\n\n")[:-2]] if stream else [raw.decode()]
        for (choice,) in (json.loads(event)["choices"] for event in events):
            text += choice["text"]
            names += choice["logprobs"]["tokens"]
            offsets += choice["logprobs"]["text_offset"]
        assert special in names and text.startswith(body["prompt"])
        assert [text[at : at + len(name)] for name, at in zip(names, offsets)] == names


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    """Tokens are keys of a completion's log-probabilities, and must differ."""
    assert [_shown_in_completions(raw) for raw in (b"a", "ä".encode(), b"\xe6\x97")] == ["a", "ä", r"bytes:\xe6\x97"]


FORMS: list[tuple[str, Any, str]] = [
    ("choice", ["yes", 'no "/"\n'], r'yes|no "/"\n'), ("regex", r"[a-c]{3}/\/x\d" + "\n", r"[a-c]{3}//x\d\n"),
    ("grammar", 'root ::= ("p" | "q") n\nn ::= [0-9] [0-9]', r"[pq]\d\d"), ("json", {"enum": [7, "b"]}, '7|"b"'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "form", "pattern"), FORMS)
@pytest.mark.parametrize("policy", ["ls:3-4", "copy:4"])
def test_text_of_a_form_in_vllms_words(client: OpenAI, policy: str, kind: str, form: Any, pattern: str) -> None:
    for fields in ({"structured_outputs": {kind: form}}, {f"guided_{kind}": form}):
        asked = {**ASK, "max_tokens": 30, "temperature": 1, "n": 2, "extra_body": {**fields, "policy": policy}}
        for choice in client.completions.create(**asked).choices:
            assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop", choice.text


def test_a_body_that_is_too_large(server: RunningServer) -> None:
    path, large = "/v1/completions", json.dumps({"model": "demo", "prompt": "x" * (5 << 20)}).encode()
    refusal(server, path, large, 413)
    refusal(server, path, iter([large[:100], large[100:]]), 413)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_frees_the_place(server: RunningServer, streamed: bool) -> None:
    cancelled = server.metric("cancelled_texts_total")
    tokens = server.metric("generated_tokens_total")
    body = {"model": "demo", "prompt": CODE, "max_tokens": 1900, "temperature": 1, "stream": streamed, "n": 3}
    connection = asking(server, {**body, "logit_bias": {"0": -100}})  # no end
    if streamed:
        assert connection.getresponse().read(10) == b'data: {"id'
    wait_until(lambda: server.metric("decoding_texts") == 3)
    connection.close()
    wait_until(lambda: server.metric("decoding_texts") == 0)
    assert server.metric("cancelled_texts_total") == cancelled + 3
    assert server.metric("generated_tokens_total") < tokens + 3 * 1900
    assert server.metric("decoding_texts") == 0


def test_an_engine_that_fails_takes_only_its_own_texts_along(
    client: OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(engine: Engine) -> list[StepOutput]:
        raise MemoryError("no memory for this round")

    monkeypatch.setattr(Engine, "step", broken)
    for stream in (False, False, True):  # a stream that fails at once has a status, too
        with pytest.raises(openai.InternalServerError, match="no memory for this round"):
            client.completions.create(**ASK, stream=stream)
    monkeypatch.undo()
    assert client.completions.create(**ASK).choices[0].text


@pytest.mark.parametrize("allowed", [None, ["any"]])
def test_a_request_runs_no_code_that_the_operator_did_not_name(
    allowed: list[str] | None, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("from policies import NeverStop\nclass Mine(NeverStop): pass", encoding="utf-8")
    (tmp_path / "other.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    own = f"ls:1-2+{tmp_path}/mine.py:Mine"
    generator = SelfSpecGenerator.from_pretrained(checkpoint, policy="ar")
    policies = ServedPolicies(generator, ServeOptions(policy=own, allow_policy=allowed))
    assert {policies.choose(name, repeats=False).name for name in (None, own)} == {own}
    for asked in (f"ls:1-3+{tmp_path}/mine.py:Mine", f"{tmp_path}/other.py:X", f"svip:1+{tmp_path}/other.py:X"):
        with pytest.raises(ValueError, match="is not allowed on this server"):
            policies.choose(asked, repeats=False)


def test_metrics_and_health(server: RunningServer, client: OpenAI) -> None:
    client.completions.create(**ASK, max_tokens=20, extra_body={"policy": "ls:3-4"})
    text = ask(server, "GET", "/metrics")[1].decode()
    assert ask(server, "GET", "/health")[0] == 200
    lines = [line for line in text.splitlines() if line.startswith("selfspec_") and "_created" not in line]
    names = {re.sub(r"(_bucket|_sum|_count)?[{ ].*", "", line) for line in lines}
    assert float(re.findall(r'selfspec_drafted_tokens_total\{exit_layer="3"\} (\S+)', text)[0]) > 0
    assert float(re.findall(r"selfspec_round_texts_count (\S+)", text)[0]) > 0
    dashboard = (ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8")
    shown = set(re.findall(r"\b(selfspec_\w+?)(?:_bucket|_sum|_count)?(?=[\[{,) \"])", dashboard))
    assert shown == names, "the dashboard shows every metric, and no other"


def test_texts_to_copy_from_are_for_every_request_that_copies(offline: SelfSpecGenerator, tmp_path: Path) -> None:
    """The server copies what the model is going to say; usage and metrics tell copied drafts from those of an exit."""
    expected = offline.generate(CODE, max_new_tokens=40)
    notes = tmp_path / "notes.txt"
    notes.write_text(CODE + (expected.text or ""), encoding="utf-8")
    wanted: dict[str, Any] = {**ASK, "max_tokens": 40}
    with running_server(offline, copy_from=[notes]) as running, running.client() as client:

        def counts(policy: str) -> dict[str, int]:
            answer = client.completions.create(**wanted, extra_body={"policy": policy})
            assert answer.choices[0].text == expected.text and answer.usage is not None
            return answer.usage.model_extra or {}

        straight, drafted = counts("copy:8"), counts("ls:3-4")
        assert 20 < straight["copied_accepted"] <= straight["copied"] == straight["drafted"]
        assert drafted["copied"] == drafted["copied_accepted"] == 0 < drafted["accepted"]
        everything = [straight, drafted]
        assert running.metric("copied_tokens_total") == sum(one["copied"] for one in everything)
        assert running.metric("accepted_copied_tokens_total") == sum(one["copied_accepted"] for one in everything)
        by_exit = {"drafted": 0, "accepted": 0}
        for name in by_exit:
            copied = "copied" if name == "drafted" else "copied_accepted"
            by_exit[name] = sum(one[name] - one[copied] for one in everything)
            assert running.metric(f"{name}_tokens_total", exit_layer="3") == by_exit[name]
        assert by_exit["drafted"] > 0
        sampled = client.completions.create(**{**wanted, "temperature": 1}, seed=5)
    again = SelfSpecGenerator.from_pretrained(DEMO_PATH).generate(
        CODE, max_new_tokens=40, do_sample=True, seed=5, policy=REPEATING, copy_from=[CODE + (expected.text or "")]
    )
    assert sampled.choices[0].text == again.text


def test_a_key_a_full_queue_and_an_orderly_end(offline: SelfSpecGenerator) -> None:
    """A second server: one place, room for one more text, a key, no chat template."""
    settings: dict[str, Any] = {"batch_size": 1, "max_waiting": 1, "api_key": "secret", "chat_template": None}
    endless: dict[str, Any] = {"model": "demo", "prompt": CODE, "max_tokens": 1900, "logit_bias": {"0": -100}}
    with running_server(offline, **settings) as running, running.client("secret") as client:
        for sent in ("bearer secret", "BEARER  secret"):
            assert post(running, "/v1/completions", {}, Authorization=sent)[0] == 400  # past the key
        for key in ("wrong", "", "secre", "sécret"):
            sent: Any = f"Bearer {key}".encode()
            status, answer = post(running, "/v1/completions", {}, Authorization=sent)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            client.chat.completions.create(model="demo", messages=SUM)
        first = client.completions.create(**endless, stream=True)
        next(iter(first))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.completions.create, **ASK, max_tokens=5)
            wait_until(lambda: running.metric("waiting_texts") == 1)
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(model="demo", prompt=CODE)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            running.server.should_exit = True  # what SIGTERM does
            first.close()
            assert waiting.result().choices[0].text == offline.generate(CODE, max_new_tokens=5).text
        running.thread.join(30)
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_key_with_an_accent(offline: SelfSpecGenerator, encoding: str) -> None:
    """Clients differ in how they send it."""
    with running_server(offline, api_key="clé") as running:
        for key, status in (("clé", 200), ("cle", 401)):
            sent: Any = f"Bearer {key}".encode(encoding)
            assert post(running, "/tokenize", {"prompt": "x"}, Authorization=sent)[0] == status
            assert ask(running, "GET", "/tokenizer_info", Authorization=sent)[0] == status


def test_an_address_that_cannot_be_used_is_refused() -> None:
    """An empty one is in tests/cli/test_options.py."""
    with open_socket("127.0.0.1", 0) as taken, pytest.raises(ValueError, match=r"in use: .*--port"):
        open_socket("127.0.0.1", taken.getsockname()[1])


def test_one_rule_of_sampling_for_requests_that_say_nothing(offline: SelfSpecGenerator) -> None:
    """It is the checkpoint's, as in Python and on the command line. Who asks for samples, and gives no temperature, has 1."""
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    asks: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"seed": 3}, {"n": 2}]
    rest: list[dict[str, Any]] = [{}, {"top_p": 1, "top_k": -1, "min_p": 0}]
    for config, most, least in ((GenerationConfig(), 1.0, None), (own, 0.6, 0.6)):
        with patch.object(offline.model, "generation_config", config):
            translator = Translator(offline, ServeOptions())
        for fields, wanted in (*((one, most) for one in asks), *((one, least) for one in rest)):
            found = translator._sampling_options(CompletionRequest(prompt="a", **fields))
            assert (found.get("temperature"), found["do_sample"]) == (wanted, wanted is not None), fields
    assert translator.offers["sampling"] == {"temperature": 0.6, "top_p": 0.9}


def test_the_command_serves_and_ends_at_sigterm(offline: SelfSpecGenerator) -> None:
    """The newcomer's path: no arguments but a port; SIGTERM lets the running stream finish.

    The model is loaded when the first line is printed, and the port answers a request that comes at once.
    """
    command = [sys.executable, "-m", "selfspec.cli.main", "serve", "--port", "0"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ})
    try:
        assert started.stderr is not None
        line = started.stderr.readline()
        said = re.fullmatch(r"ready: serving demo at (http://127\.0\.0\.1:(\d+)/v1), with a page at (\S+) .*\n", line)
        assert said is not None and f"{said[3]}v1" == said[1], line
        assert started.stderr.readline().startswith("  on ")
        assert started.stderr.readline() == "  where a request says nothing: policy auto, temperature 0\n"
        memory = 8 * 2048 * offline.bound.pool.row_bytes / 1e6
        assert f"at most {memory:.0f} MB for 8 texts of 2,048 tokens (--batch-size" in started.stderr.readline()
        request = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(said[2])), timeout=30) as connection:
            connection.sendall(request)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"demo"' in answer
        with OpenAI(base_url=said[1], api_key="none", max_retries=0, timeout=60) as client:
            stream = client.completions.create(
                model="demo", prompt=CODE, max_tokens=300, temperature=0, stream=True, logit_bias={"0": -100}
            )
            text = next(iter(stream)).choices[0].text
            started.send_signal(signal.SIGTERM)
            text += "".join(chunk.choices[0].text for chunk in stream)
        unending = GenerationConfig(suppress_tokens=[0])
        assert text == offline.generate(CODE, max_new_tokens=300, generation_config=unending).text
        assert started.wait(30) in (0, -signal.SIGTERM)
        logged = r"GET /v1/models 200 [\d.]+ s \w{32}\nPOST /v1/completions 200 10 \+ 300 tokens [\d.]+ s \w{32}\n"
        assert re.fullmatch(logged, started.stderr.read())
    finally:
        started.kill()
        started.wait()
        assert started.stderr is not None
        started.stderr.close()
