"""The check of servers on servers of others, where they are installed: it must finish, and say something of every way to ask.

What it says of them is on docs/checking-servers.md; a test of ours does not depend on it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from bench.engines.servers import served_folder, transformers_server
from layerskip_models import DEMO_PATH
from layerskip_models.checkpoints.named_models import NAMED_MODELS
from selfspec.analysis.server_check.checking import CheckSettings, check_server
from selfspec.analysis.server_check.client import ServedModel
from selfspec.analysis.server_check.findings import ServerFindings
from selfspec.analysis.server_check.screen import finding_lines

pytestmark = pytest.mark.slow
SETTINGS = CheckSettings(max_tokens=12, companies=(2,))
_SMOLLM2 = NAMED_MODELS["smollm2"].find()


def answered(found: ServerFindings) -> None:
    """Every way was tried, and one request alone gives one text each time it is asked."""
    assert found.requests <= SETTINGS.num_requests(found.plain is not None)
    assert all(way.compared or way.unsupported for way in found.ways), finding_lines(found)
    assert not any(way.failed or way.busy for way in found.ways), finding_lines(found)
    (again,) = [way for way in found.ways if (way.section, way.name) == ("greedy", "alone, again")]
    assert (again.compared, again.differing) == (len(SETTINGS.prompts), 0)


def test_transformers_serve() -> None:
    """Without continuous batching, which by default takes most of the memory for its cache."""
    try:
        with (
            served_folder(DEMO_PATH, None) as folder,
            transformers_server(folder, "float32", continuous_batching=False) as server,
        ):
            served = ServedModel(url=f"http://127.0.0.1:{server.port}/v1", model=server.model)
            answered(check_server(served, None, SETTINGS))
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.skipif(_SMOLLM2 is None, reason="needs a GGUF file with a tokenizer: selfspec get smollm2")
@pytest.mark.skipif(
    not all(find_spec(name) for name in ("llama_cpp", "sse_starlette", "starlette_context", "pydantic_settings")),
    reason="pip install 'llama-cpp-python[server]'",
)
def test_the_server_of_llama_cpp_python_with_and_without_drafts() -> None:
    assert _SMOLLM2 is not None
    with _llama_cpp_server(_SMOLLM2) as plain, _llama_cpp_server(_SMOLLM2, "prompt-lookup-decoding") as fast:
        answered(check_server(ServedModel(url=fast, model="m"), ServedModel(url=plain, model="m"), SETTINGS))


@pytest.mark.skipif("LLAMA_SERVER" not in os.environ, reason="set LLAMA_SERVER to the path of llama.cpp's llama-server")
@pytest.mark.skipif(_SMOLLM2 is None, reason="needs a GGUF file with a tokenizer: selfspec get smollm2")
@pytest.mark.parametrize("speculation", [(), ("--spec-type", "ngram-simple")])
def test_llama_server(speculation: tuple[str, ...]) -> None:
    options = ["-m", str(_SMOLLM2), "--alias", "m", "-np", "2", "-c", "2048", "--offline", *speculation]
    with _started([os.environ["LLAMA_SERVER"], "--host", "127.0.0.1", *options]) as url:
        answered(check_server(ServedModel(url=url, model="m"), None, SETTINGS))


@contextmanager
def _llama_cpp_server(file: Path, draft: str | None = None) -> Iterator[str]:
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(file), "--model_alias", "m", "--n_ctx", "2048"]
    with _started([*command, *(["--draft_model", draft] if draft else [])]) as url:
        yield url


@contextmanager
def _started(command: list[str]) -> Iterator[str]:
    """Run a server on a free port until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/v1"
        end = time.monotonic() + 180
        while True:
            try:
                urlopen(f"{url}/models", timeout=5).close()
                break
            except (URLError, OSError):
                assert process.poll() is None and time.monotonic() < end, f"{command[0]} did not start"
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)
