"""The app: OpenAI's and Anthropic's routes over one scheduler, vLLM's for tokens, and a page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from importlib.resources import files
from time import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from selfspec import SelfSpecGenerator
from selfspec.serve import api_errors
from selfspec.serve.api_errors import CLIENT_LEFT, COUNT, MESSAGES, ApiError, request_failed, shutting_down
from selfspec.serve.api_requests import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from selfspec.serve.api_responses import Answer, ChatAnswer, CompletionAnswer, Piece
from selfspec.serve.bodies import IGNORED, LARGE_BODY, SMALL_BODY, WorkerQueue, described, read_body
from selfspec.serve.messages_api import CountTokensRequest, MessagesAnswer, MessagesRequest
from selfspec.serve.other_apis import OtherRequest
from selfspec.serve.request_limits import REQUEST_ID, RequestLimits
from selfspec.serve.request_stream import RequestStream
from selfspec.serve.responses_api import ResponsesAnswer, ResponsesRequest
from selfspec.serve.running import gc_frozen, memory_returned
from selfspec.serve.scheduler import Scheduler, ServedSequence
from selfspec.serve.serve_options import ServeOptions
from selfspec.serve.server_metrics import ServerMetrics
from selfspec.serve.translation import Translator

log = logging.getLogger("selfspec.serve")
PING_SECONDS = 10.0  # longest time between two events of a stream
_LAST_SECONDS = 1.0  # for a stream to tell its client that the server ends
_FEW_TEXTS = 4  # of a request, for which a thread would only be a delay
_FEW_LOGPROBS = 256


def make_app(generator: SelfSpecGenerator, options: ServeOptions) -> FastAPI:
    """Make the app of one model, whose scheduler runs as long as it. Raises ValueError for a policy that does not fit."""
    options.check()
    metrics = ServerMetrics()
    translator = Translator(generator, options)
    served: dict[str, Any] = {"id": options.name, "created": int(time()), "object": "model", "owned_by": "selfspec"}
    served |= {"max_model_len": translator.prompts.max_context, "selfspec": translator.offers}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.scheduler = Scheduler(generator, options, metrics)
        app.state.queue = WorkerQueue()
        try:
            async with memory_returned(), gc_frozen():
                yield
        finally:
            app.state.queue.close()
            await asyncio.to_thread(app.state.scheduler.close)
            await asyncio.to_thread(translator.schemas.close)

    app = FastAPI(title="selfspec", lifespan=lifespan, docs_url=None, redoc_url=None, responses=api_errors.DESCRIBED)
    app.state.metrics, app.state.translator = metrics, translator

    async def answer(request: Request, kind: type[Any], make: Callable[..., Answer]) -> Response:
        state = request.app.state
        given, size = await read_body(request, kind, state.queue)
        is_other = isinstance(given, OtherRequest)
        body: Body = given.chat if is_other else given
        with given.own_words() if is_other else nullcontext():
            texts = await _translated(request, body, size)
            tokenizer, shows = translator.prompts.tokenizer, body.show_drafts
            stream = RequestStream(state.scheduler, texts, tokenizer, streamed=body.stream, show_drafts=shows)
            request.state.stream, request.state.n = stream, body.n  # for the log
            state.scheduler.submit(texts)
            writer = make(options.name, translator.vocabulary, given, texts[0].call.request.prompt.numel())
            response = await (_stream if body.stream else _whole)(request, body, stream, writer, size > LARGE_BODY)
        response.headers.update(body.ignored_fields_header)
        return response

    @app.post("/v1/chat/completions", openapi_extra=described("/v1/chat/completions", ChatRequest))
    async def chat(request: Request) -> Response:
        return await answer(request, ChatRequest, ChatAnswer)

    @app.post("/v1/completions", openapi_extra=described("/v1/completions", CompletionRequest))
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionRequest, CompletionAnswer)

    @app.post("/v1/responses", openapi_extra=described("/v1/responses", ResponsesRequest))
    async def responses(request: Request) -> Response:
        return await answer(request, ResponsesRequest, ResponsesAnswer)

    @app.post(MESSAGES, openapi_extra=described(MESSAGES, MessagesRequest))
    async def messages(request: Request) -> Response:
        return await answer(request, MessagesRequest, MessagesAnswer)

    @app.post(COUNT, openapi_extra=described(COUNT, CountTokensRequest))
    async def count_tokens(request: Request) -> JSONResponse:
        queue = request.app.state.queue
        body, size = await read_body(request, CountTokensRequest, queue)
        with body.own_words():
            translator.check_name(body.model)
            tools = body.chat.tools if body.chat.callable_tools else ()
            ids = await queue.run_by_size(size, lambda: translator.prompts.of_chat(body.chat, tools=tools))
        return JSONResponse({"input_tokens": len(ids)}, headers=body.chat.ignored_fields_header)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [served]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        translator.check_name(name)
        return JSONResponse(served)

    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        if not request.app.state.scheduler.alive:
            raise shutting_down()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    _add_token_routes(app, translator)
    _add_page(app)
    api_errors.install(app)
    known = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(RequestLimits, options=options, metrics=metrics, routes=known)
    if options.allow_origin:  # outside: a browser asks first, without a key
        answers: dict[str, Any] = {"allow_origins": options.allow_origin, "allow_methods": ["GET", "POST"]}
        shown = ["Retry-After", REQUEST_ID, IGNORED]
        app.add_middleware(CORSMiddleware, **answers, allow_headers=["*"], expose_headers=shown)
    return app


def _add_token_routes(app: FastAPI, translator: Translator) -> None:
    """Text and messages to tokens and back, as in vLLM."""
    prompts = translator.prompts

    def tokens(body: TokenizeRequest) -> list[int]:
        translator.check_name(body.model)
        if body.prompt is not None:
            return prompts.of_text(body.prompt, special=body.add_special_tokens is not False)
        asks = None if body.continue_final_message else body.add_generation_prompt
        return prompts.of_chat(body, asks, tools=body.tools)

    @app.post("/tokenize", openapi_extra=described("/tokenize", TokenizeRequest))
    async def tokenize(request: Request) -> JSONResponse:
        queue = request.app.state.queue
        body, size = await read_body(request, TokenizeRequest, queue)
        ids = await queue.run_by_size(size, lambda: tokens(body))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": prompts.max_context, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = prompts.tokenizer.convert_ids_to_tokens(ids)
        return JSONResponse(found, headers=body.ignored_fields_header)

    @app.post("/detokenize", openapi_extra=described("/detokenize", DetokenizeRequest))
    async def detokenize(request: Request) -> JSONResponse:
        queue = request.app.state.queue
        body, size = await read_body(request, DetokenizeRequest, queue)
        translator.check_name(body.model)
        text = await queue.run_by_size(size, lambda: prompts.text_of(body.tokens))
        return JSONResponse({"prompt": text}, headers=body.ignored_fields_header)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> JSONResponse:
        tokenizer = prompts.tokenizer
        about: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__, "model_max_length": prompts.max_context}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            about[name] = getattr(tokenizer, name, None)
        return JSONResponse({**about, "chat_template": prompts.template_source})


def _add_page(app: FastAPI) -> None:
    """Serve the page at `/`. It calls only the API of the same server."""
    page = files("selfspec.serve").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
    headers["Content-Security-Policy"] = content_policy(page)

    @app.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)


def content_policy(page: str) -> str:
    """Write the Content-Security-Policy: only the page's own script and style run, and only its own server is called."""

    def hashes(tag: str) -> str:
        sources = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in sources)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _translated(request: Request, body: Body, size: int) -> list[ServedSequence]:
    """Translate, in a thread if that may take long. There must be room before, and still when a thread is free."""
    queue, scheduler, translator = (getattr(request.app.state, name) for name in ("queue", "scheduler", "translator"))

    def work() -> list[ServedSequence]:
        scheduler.check_room(body.num_texts)
        return translator.texts(body)

    scheduler.check_room(body.num_texts)
    if translator.has_slow_schema(body, size):
        return await queue.run(work, kind="schemas")
    if body.num_texts > _FEW_TEXTS:
        return await queue.run(work)
    if body.logit_bias or body.policy or body.form[1] is not None or body.schemas:
        size = max(size, SMALL_BODY + 1)
    return await queue.run_by_size(size, work)


async def _written(parts: Sequence[Piece], write: Callable[[], str], is_large: bool) -> str:
    """Write an answer or a chunk, in a thread if it has many log-probabilities, or may repeat a large request's fields."""
    is_long = is_large or sum(len(part.logprobs or ()) for part in parts) > _FEW_LOGPROBS
    return await asyncio.to_thread(write) if is_long else write()


async def _whole(request: Request, body: Body, stream: RequestStream, answer: Answer, is_large: bool) -> Response:
    """Send the answer, or nothing if the client leaves before it is complete: its texts are then cancelled at once."""
    working = asyncio.ensure_future(stream.whole())
    try:
        if not await _client_stays(request.receive, working):
            return Response(status_code=CLIENT_LEFT)
        parts = working.result()
        content = await _written(parts, partial(answer.whole, parts, stream.results, body.n), is_large)
        return Response(content, media_type="application/json")
    finally:
        working.cancel()
        stream.cancel()


async def _events(body: Body, stream: RequestStream, answer: Answer, is_large: bool) -> AsyncGenerator[str, None]:
    async for piece in stream.pieces():
        yield await _written([piece], partial(answer.chunk, piece), is_large)
    shows_usage = body.stream_options is not None and body.stream_options.include_usage
    last = partial(answer.last_chunk, stream.results, body.n, shows_usage)
    yield await _written([], last, is_large or answer.repeats_logprobs)


async def _stream(request: Request, body: Body, stream: RequestStream, answer: Answer, is_large: bool) -> Response:
    """Send a stream, or an error with its status if that comes before the first piece and the first `PING_SECONDS`."""
    events = _events(body, stream, answer, is_large)
    first = asyncio.ensure_future(events.__anext__())
    begun = False
    try:
        if not await _client_stays(request.receive, first, PING_SECONDS):
            return Response(status_code=CLIENT_LEFT)
        if first.done():
            first.result()
        begun = True
        return _EventStream(stream, _with_pings(first, events, answer))
    finally:
        if not begun:
            first.cancel()
            stream.cancel()


async def _with_pings(
    following: asyncio.Future[str], events: AsyncGenerator[str, None], answer: Answer
) -> AsyncIterator[str]:
    """Pass all events on, with pings during long waits. following: the first event."""
    try:
        while True:
            await asyncio.wait({following}, timeout=PING_SECONDS)
            if not following.done():
                yield answer.ping
                continue
            yield following.result()
            following = asyncio.ensure_future(events.__anext__())
    except StopAsyncIteration:
        return
    except Exception as error:  # the status has been sent
        if not isinstance(error, ApiError):
            log.exception("a stream failed")
            error = request_failed()
        yield answer.failure(error)
    finally:
        following.cancel()
        del following  # the traceback of its exception has this frame: a circle


class _EventStream(StreamingResponse):
    """A response that cancels its texts when it ends, however it ends.

    Starlette itself would watch for the client with anyio, which leaves all that was cancelled in a circle of its exception
    and a frame.
    """

    def __init__(self, stream: RequestStream, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        try:
            if await _client_stays(receive, sending):
                sending.result()
        except asyncio.CancelledError:  # the grace time is over
            self._stream.fail(shutting_down())
            await asyncio.wait({sending}, timeout=_LAST_SECONDS)
        finally:
            sending.cancel()
            self._stream.cancel()


async def _client_stays(receive: Receive, work: asyncio.Future[Any], seconds: float | None = None) -> bool:
    """Wait until the work is done, but no longer than these seconds. False if the client leaves before."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(leave())
    try:
        await asyncio.wait({work, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or not leaving.done()
    finally:
        leaving.cancel()
