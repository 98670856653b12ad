"""A server of OpenAI's API that writes scripted texts, and errs as a test asks.

Its texts are words, one a token, that follow from the prompt. What it does wrong is a set of names from `FAULTS`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any
from unittest.mock import patch

from selfspec.analysis.server_check import checking
from selfspec.analysis.server_check.company import ask_in_groups

FAULTS = {
    "company": "another token at index 5, far less likely, while other requests are there",
    "company tie": "another token at index 5, nearly as likely, while other requests are there",
    "company ends": "the text ends after 5 tokens while other requests are there",
    "no stop": "stop strings are ignored",
    "stop kept": "the stop string stays in the text",
    "streams lose": "a stream loses its third token",
    "logprobs": "log probabilities are 0.5 lower while other requests are there",
    "chosen only": "log probabilities are of the choice: 0",
    "drifts": "a seeded text changes while other requests are there",
    "one text": "the seed has no effect",
    "speculation": 'the model "fast" takes another token at index 5, far less likely',
    "busy": "status 429 while other requests are there",
    "breaks": "status 500 for streams",
    "breaks off": "streams end in the middle of an event",
    "no logprobs": "log probabilities are left out",
    "no seeds": "status 400 for a seed",
    "no completions": "only chats",
    "serial": "one request after the other",
    "silent": "every text is empty",
}
WORDS = ("sun", "moon", "river", "stone", "cloud", "tree", "bird", "light")
CHANGED_TOKEN = 5
_IN_COMPANY = {"company", "company tie", "company ends", "logprobs", "drifts", "busy"}
_TOGETHER_SECONDS = 2.0  # within which requests that were sent at once arrive; less if they come one by one


@dataclass
class ErringServer:
    """url: up to `/v1`. bodies: what was asked, in the order of arrival."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def erring_server(*faults: str) -> Iterator[ErringServer]:
    """On 127.0.0.1, until the block ends. Its models are called "fast" and "plain".

    The check tells it how many requests are about to come at once, so that it waits for those and for no others.
    """
    assert set(faults) <= set(FAULTS), faults
    company = _Company()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(set(faults), company))
    server.daemon_threads = True
    running = ErringServer(f"http://127.0.0.1:{server.server_address[1]}/v1")
    server.bodies = running.bodies  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def ask(send: Any, questions: Any, size: int, *rest: Any) -> Any:
        company.expected = size
        return ask_in_groups(send, questions, size, *rest)

    try:
        with patch.object(checking, "ask_in_groups", ask):
            yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def scripted(prompt: str, seed: int | None, count: int) -> list[str]:
    """The tokens of a text without faults."""
    draw = Random(f"{prompt} {seed}")
    return [" " + draw.choice(WORDS) for _ in range(count)]


@dataclass
class _Company:
    """Which requests are there at once. expected: how many are sent at once."""

    expected: int = 1
    here: list[_Visit] = field(default_factory=list)
    come: threading.Condition = field(default_factory=threading.Condition)

    def visit(self, wait: bool) -> bool:
        """Whether a request that has come has company. wait: it stays until all have come that were sent with it."""
        visit = _Visit()
        with self.come:
            self.here.append(visit)
            for each in self.here:
                each.company = max(each.company, len(self.here))
            self.come.notify_all()
            if wait:
                self.come.wait_for(lambda: visit.company >= self.expected, _TOGETHER_SECONDS)
            self.here.remove(visit)  # before its answer is whole, after which a client may ask again at once
        return visit.company > 1


@dataclass(eq=False)
class _Visit:
    """A request that is there. company: the most that were there with it at any time, itself included."""

    company: int = 0


def _handler(faults: set[str], company: _Company) -> type[BaseHTTPRequestHandler]:
    one_by_one = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or an answer waits for the client's word that its headers have come

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in ("fast", "plain")]
            self._answer(200, {"object": "list", "data": models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.bodies.append(body)  # type: ignore[attr-defined]
            together = company.visit(wait=bool(_IN_COMPANY & faults))
            with one_by_one if "serial" in faults else nullcontext():
                self._respond(body, together)

        def _respond(self, body: dict[str, Any], together: bool) -> None:
            chat = self.path.endswith("/chat/completions")
            if not chat and "no completions" in faults:
                self._answer(404, {"error": {"message": "no such route"}})
            elif "busy" in faults and together:
                self._answer(429, {"error": {"message": "come again"}})
            elif "breaks" in faults and body.get("stream"):
                self._answer(500, {"error": {"message": "out of order"}})
            elif "no seeds" in faults and "seed" in body:
                self._answer(400, {"error": {"message": "seed is not supported"}})
            else:
                choices = _choices(body, chat, together, faults)
                if body.get("stream"):
                    self._stream(choices, chat)
                else:
                    self._answer(
                        200, {"id": "1", "object": "text", "created": 0, "model": "fast", "choices": choices[-1:]}
                    )

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self, choices: list[dict[str, Any]], chat: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for choice in choices[:-1]:
                event = json.dumps({"id": "1", "object": "text", "created": 0, "model": "fast", "choices": [choice]})
                if "breaks off" in faults:
                    event = event[:-9]
                self.wfile.write(f"data: {event}\n\n".encode())
                self.wfile.flush()
                if company.expected > 1:  # so that streams overlap in time, or clearly do not
                    time.sleep(0.01 if "serial" in faults else 0.002)
            self.wfile.write(b"data: [DONE]\n\n")

    return Handler


def _choices(body: dict[str, Any], chat: bool, together: bool, faults: set[str]) -> list[dict[str, Any]]:
    """The pieces of a stream, and last the answer as a whole."""
    prompt = body["messages"][0]["content"] if chat else body["prompt"]
    seed = None if "one text" in faults else body.get("seed")
    count = 0 if "silent" in faults else body["max_tokens"]
    tokens = scripted(prompt, seed, count)
    stop = body.get("stop")
    changed = {"company", "company tie"} & faults and together and seed is None and stop is None
    drifts = "drifts" in faults and together and seed is not None
    if (changed or drifts or ("speculation" in faults and body["model"] == "fast")) and count > CHANGED_TOKEN:
        tokens[CHANGED_TOKEN] = other_token(tokens[CHANGED_TOKEN])
    if "company ends" in faults and together:
        tokens = tokens[:CHANGED_TOKEN]
    text, reason = "".join(tokens), "length"
    if stop is not None and stop in text and "no stop" not in faults:
        text, reason = text[: text.index(stop) + len(stop) * ("stop kept" in faults)], "stop"
    gap = 0.1 if "company tie" in faults else 3.0
    base = 0.0 if "chosen only" in faults else -0.5 - 0.5 * ("logprobs" in faults and together)
    scores = body.get("logprobs") is not None and "no logprobs" not in faults
    pieces = []
    written = 0
    for index, token in enumerate(tokens):
        shown = text[written : written + len(token)]
        written += len(token)
        if shown and not ("streams lose" in faults and index == 2):
            pieces.append(_choice(chat, shown, [token] if scores else [], base, gap, None, delta=True))
    pieces.append(_choice(chat, "", [], base, gap, reason, delta=True))
    return [*pieces, _choice(chat, text, tokens if scores else [], base, gap, reason)]


def other_token(token: str) -> str:
    """The token that a fault puts in place of this one."""
    return " " + WORDS[(WORDS.index(token.strip()) + 1) % len(WORDS)]


def _choice(
    chat: bool, text: str, tokens: list[str], base: float, gap: float, reason: str | None, delta: bool = False
) -> dict[str, Any]:
    tops = [{token: base, other_token(token): base - gap} for token in tokens]
    found: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    if chat:
        found["delta" if delta else "message"] = {"role": "assistant", "content": text}
        if tokens:
            content = [
                {
                    "token": token,
                    "bytes": [*token.encode()],
                    "logprob": base,
                    "top_logprobs": [{"token": other, "bytes": None, "logprob": value} for other, value in top.items()],
                }
                for token, top in zip(tokens, tops)
            ]
            found["logprobs"] = {"content": content}
        return found
    found["text"] = text
    if tokens:
        found["logprobs"] = {"tokens": tokens, "token_logprobs": [base] * len(tokens), "top_logprobs": tops}
    return found
