"""The demo checkpoint, a server that any request may use, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from layerskip_models import DEMO_PATH
from running_server import RunningServer, running_server
from selfspec import SelfSpecGenerator


@pytest.fixture(scope="module")
def offline() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(SelfSpecGenerator.from_pretrained(DEMO_PATH), batch_size=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with server.client() as opened:
        yield opened
