"""The app: OpenAI's routes over one scheduler."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from time import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Model
from starlette.types import Message, Receive, Scope, Send

from selfspec import SelfSpecGenerator
from selfspec.parallel.mirrored_engine import follow, leading_engine
from selfspec.serve import api_errors
from selfspec.serve.answering import Texts
from selfspec.serve.api_errors import ApiError
from selfspec.serve.api_requests import ChatRequest, CompletionRequest, GenerationRequest
from selfspec.serve.api_responses import Answer, ChatAnswer, CompletionAnswer, usage
from selfspec.serve.guard import Guard
from selfspec.serve.scheduler import Scheduler
from selfspec.serve.server_metrics import CONTENT_TYPE, ServerMetrics
from selfspec.serve.server_settings import ServerSettings
from selfspec.serve.translation import Choice, Translator, check_model
from selfspec.serve.web_page import add_page

_SMALL_BODY = 1 << 14  # bytes; its prompt becomes tokens within some milliseconds
_CLIENT_LEFT = 499  # nobody reads it; the log and the metrics do


def make_app(generator: SelfSpecGenerator, settings: ServerSettings) -> FastAPI:
    """The app of one model. Its scheduler runs from the app's start to its shutdown.

    generator: with a tokenizer. Raises ValueError for a policy that does not fit the model.
    """
    metrics = ServerMetrics()
    translator = Translator(generator, settings)
    make_engine = leading_engine(generator, settings.policy, [translator.vocabulary])
    created = int(time())
    served = Model(
        id=settings.model_name,
        created=created,
        object="model",
        owned_by="selfspec",
        selfspec=translator.offers,  # type: ignore[call-arg]
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.scheduler = Scheduler(
            metrics, batch_size=settings.batch_size, max_waiting=settings.max_waiting, make_engine=make_engine
        )
        try:
            yield
        finally:
            await asyncio.to_thread(app.state.scheduler.close)

    app = FastAPI(title="selfspec", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.metrics, app.state.translator = metrics, translator
    api_errors.install(app)

    async def answer(request: Request, body: GenerationRequest, choices: list[Choice], answer: Answer) -> Response:
        texts = Texts(
            request.app.state.scheduler,
            choices,
            translator.tokenizer,
            streamed=body.stream,
            show_drafts=body.show_drafts,
        )
        texts.submit()
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            return _EventStream(texts, _events(texts, answer, body.n, include_usage))
        return await _unless_disconnected(request, texts, _whole(texts, answer, body.n))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        choices = await _translated(request, body, partial(translator.chat, body))
        return await answer(request, body, choices, ChatAnswer(settings.model_name, translator.vocabulary))

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        choices = await _translated(request, body, partial(translator.completions, body))
        return await answer(request, body, choices, CompletionAnswer(settings.model_name, translator.vocabulary))

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [served.model_dump(exclude_unset=True)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        check_model(name, settings.model_name)
        return JSONResponse(served.model_dump(exclude_unset=True))

    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        if not request.app.state.scheduler.alive:
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    add_page(app)
    known = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(Guard, settings=settings, metrics=metrics, routes=known)
    return app


def follow_server(generator: SelfSpecGenerator, settings: ServerSettings) -> None:
    """What the other ranks do while rank 0 serves a model that is divided over them. Returns when the server has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # running requests may finish: rank 0 says when it is over
    translator = Translator(generator, settings)
    follow(generator, settings.policy, translator.copies, [translator.vocabulary])


async def _translated(request: Request, body: GenerationRequest, translate: Callable[[], list[Choice]]) -> list[Choice]:
    """In a thread of its own if that may take long: a long prompt, or a schema. Else at once, which a thread would delay."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= _SMALL_BODY and body.response_format is None:
        return translate()
    return await asyncio.to_thread(translate)


async def _whole(texts: Texts, answer: Answer, choices_per_prompt: int) -> Response:
    parts = await texts.whole()
    return Response(answer.whole(parts, usage(texts.results, choices_per_prompt)), media_type="application/json")


async def _events(texts: Texts, answer: Answer, choices_per_prompt: int, include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events: a chunk each, then [DONE]."""
    try:
        async for piece in texts.pieces():
            yield f"data: {answer.chunk(piece)}\n\n"
        if include_usage:
            yield f"data: {answer.chunk(None, usage(texts.results, choices_per_prompt))}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status is out already
        yield f"data: {json.dumps(error.body())}\n\n"


class _EventStream(StreamingResponse):
    """A stream that frees its texts' places when it ends, however it ends.

    Its head goes out with its first piece: a request that fails before that may be sent again, by whoever is in between.
    """

    def __init__(self, texts: Texts, events: AsyncIterator[str]) -> None:
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

        try:
            await super().__call__(scope, receive, with_the_first_piece)
        finally:
            self._texts.cancel()


async def _unless_disconnected(request: Request, texts: Texts, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer, or nothing if the client leaves before it is there: its texts' places are then free at once."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=_CLIENT_LEFT)
    finally:
        working.cancel()
        watching.cancel()
        texts.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
