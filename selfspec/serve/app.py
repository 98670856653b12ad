"""The app: OpenAI's routes over one scheduler."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from selfspec import SelfSpecGenerator
from selfspec.serve import api_errors
from selfspec.serve.answering import RequestStream
from selfspec.serve.api_errors import CLIENT_LEFT, ApiError, request_failed, shutting_down
from selfspec.serve.api_requests import ChatRequest, CompletionRequest, GenerationRequest
from selfspec.serve.api_responses import Answer, ChatAnswer, CompletionAnswer, Piece
from selfspec.serve.bodies import read_body
from selfspec.serve.guard import Guard
from selfspec.serve.lanes import WorkerQueues
from selfspec.serve.memory_return import MemoryReturn, gc_frozen
from selfspec.serve.scheduler import Scheduler, ServedSequence
from selfspec.serve.server_metrics import CONTENT_TYPE, ServerMetrics
from selfspec.serve.server_settings import ServerSettings
from selfspec.serve.token_routes import add_token_routes
from selfspec.serve.translation import Translator
from selfspec.serve.web_page import add_page

log = logging.getLogger("selfspec.serve")
PING_SECONDS = 10.0
"""Longest time between two events of a stream."""
_LAST_SECONDS = 1.0  # for a stream to tell its client that the server ends
_FEW_TEXTS = 4  # of a request, for which a thread would only be a delay
_FEW_LOGPROBS = 256


def make_app(generator: SelfSpecGenerator, settings: ServerSettings) -> FastAPI:
    """Make the app of one model. Its scheduler runs from the app's start to its shutdown.

    generator: has a tokenizer. Raises ValueError for a policy that does not fit the model.
    """
    metrics = ServerMetrics()
    translator = Translator(generator, settings)
    served = {
        "id": settings.model_name, "created": int(time()), "object": "model", "owned_by": "selfspec",
        "selfspec": translator.offers,
    }  # fmt: skip

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.scheduler = Scheduler(generator, settings, metrics)
        app.state.lanes = WorkerQueues()
        memory = MemoryReturn()
        try:
            with gc_frozen():
                yield
        finally:
            app.state.lanes.close()
            memory.close()
            await asyncio.to_thread(app.state.scheduler.close)
            await asyncio.to_thread(translator.close)

    app = FastAPI(title="selfspec", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.metrics, app.state.translator = metrics, translator
    api_errors.install(app)

    async def answer(request: Request, kind: type[ChatRequest] | type[CompletionRequest], answer: Answer) -> Response:
        lanes, scheduler = request.app.state.lanes, request.app.state.scheduler
        body, size = await read_body(request, kind, lanes)
        choices = await _translated(lanes, scheduler, translator, body, size)
        texts = RequestStream(
            scheduler, choices, translator.tokenizer, streamed=body.stream, show_drafts=body.show_drafts
        )
        scheduler.submit(choices)
        response = await (_stream if body.stream else _whole)(request, body, texts, answer)
        response.headers.update(body.ignored_fields_header)
        return response

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, ChatRequest, ChatAnswer(settings.model_name, translator.vocabulary))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionRequest, CompletionAnswer(settings.model_name, translator.vocabulary))

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
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    add_token_routes(app, translator)
    add_page(app)
    known = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(Guard, settings=settings, metrics=metrics, routes=known)
    return app


async def _translated(
    lanes: WorkerQueues, scheduler: Scheduler, translator: Translator, body: ChatRequest | CompletionRequest, size: int
) -> list[ServedSequence]:
    """Translate in a thread if that may take long: for a long prompt, many texts, biases, a grammar, or a policy.

    The scheduler is asked for room first, and again when a thread is free: others may have taken the room meanwhile.
    """

    def work() -> list[ServedSequence]:
        scheduler.check_room(body.num_texts)
        return translator.chat(body) if isinstance(body, ChatRequest) else translator.completions(body)

    scheduler.check_room(body.num_texts)
    if translator.has_slow_schema(body, size):
        return await lanes.schemas.run(work)
    if body.num_texts > _FEW_TEXTS:
        return await lanes.prompts.run(work)
    return await lanes.prompts.run_by_size(size, work, is_quick=not translator.is_slow(body))


async def _written(parts: Sequence[Piece], write: Callable[[], str]) -> str:
    """Write an answer or a chunk, in a thread if it has many log-probabilities."""
    is_long = sum(len(part.logprobs or ()) for part in parts) > _FEW_LOGPROBS
    return await asyncio.to_thread(write) if is_long else write()


async def _whole(request: Request, body: GenerationRequest, texts: RequestStream, answer: Answer) -> Response:
    """Send the answer, or nothing if the client leaves before it is complete: its texts are then cancelled at once."""
    working = asyncio.ensure_future(texts.whole())
    try:
        if not await _client_stays(request.receive, working):
            return Response(status_code=CLIENT_LEFT)
        parts = working.result()
        content = await _written(parts, partial(answer.whole, parts, texts.results, body.n))
        return Response(content, media_type="application/json")
    finally:
        working.cancel()
        texts.cancel()


async def _events(body: GenerationRequest, texts: RequestStream, answer: Answer) -> AsyncGenerator[str, None]:
    async for piece in texts.pieces():
        yield f"data: {await _written([piece], partial(answer.chunk, piece))}\n\n"
    if body.stream_options is not None and body.stream_options.include_usage:
        yield f"data: {answer.last_chunk(texts.results, body.n)}\n\n"
    yield "data: [DONE]\n\n"


async def _stream(request: Request, body: GenerationRequest, texts: RequestStream, answer: Answer) -> Response:
    """Send a stream, or an error with its status if nothing was sent before. During a long wait the client gets comments,
    since a proxy may close a silent connection."""
    events = _events(body, texts, answer)
    first = asyncio.ensure_future(events.__anext__())
    begun = False
    try:
        if not await _client_stays(request.receive, first, PING_SECONDS):
            return Response(status_code=CLIENT_LEFT)
        if first.done():
            first.result()
        begun = True
        return _EventStream(texts, _with_pings(first, events))
    finally:
        if not begun:
            first.cancel()
            texts.cancel()


async def _with_pings(following: asyncio.Future[str], events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """All events, with comments during long waits. following: the first event."""
    try:
        while True:
            await asyncio.wait({following}, timeout=PING_SECONDS)
            if not following.done():
                yield ": waiting\n\n"
                continue
            yield following.result()
            following = asyncio.ensure_future(events.__anext__())
    except StopAsyncIteration:
        return
    except Exception as error:  # the status has been sent
        if not isinstance(error, ApiError):
            log.exception("a stream failed")
            error = request_failed()
        yield f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n"
    finally:
        following.cancel()
        del following  # the traceback of its exception has this frame: a circle


class _EventStream(StreamingResponse):
    """A stream that cancels its texts when it ends, however it ends.

    Its headers go out with its first piece. A proxy may send a request that fails before that once more. Starlette itself
    would watch for the client with anyio, which leaves all that was cancelled in a circle of its exception and a frame.
    """

    def __init__(self, texts: RequestStream, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held: list[Message] = []

        async def with_the_first_piece(message: Message) -> None:
            held.append(message)
            if message["type"] != "http.response.start":
                for one in held:
                    await send(one)
                held.clear()

        sending = asyncio.ensure_future(self.stream_response(with_the_first_piece))
        try:
            if await _client_stays(receive, sending):
                sending.result()
        except asyncio.CancelledError:  # the grace time is over
            self._texts.fail(shutting_down())
            await asyncio.wait({sending}, timeout=_LAST_SECONDS)
        finally:
            sending.cancel()
            self._texts.cancel()


async def _client_stays(receive: Receive, work: asyncio.Future[Any], seconds: float | None = None) -> bool:
    """Wait until the work is done, but no longer than these seconds. False if the client leaves before."""
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return work.done() or not leaving.done()
    finally:
        leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
