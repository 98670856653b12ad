"""Servers as processes of their own: ours and transformers', on one folder."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

START_SECONDS = 180
"""Within which a server must answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. model: what requests call it. process: for its memory and processor time."""

    name: str
    label: str
    port: int
    model: str
    process: psutil.Process

    def connect(self, timeout: float = 300) -> http.client.HTTPConnection:
        """Open a new connection, without delays for small packets."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        with closing(self.connect(10)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()


def selfspec_server(folder: Path, options: Sequence[str] = ()) -> AbstractContextManager[Server]:
    """Run `selfspec serve FOLDER`."""
    command = [sys.executable, "-m", "selfspec.cli.main", "serve", str(folder), "--served-name", "served", *options]
    return _running(command, "selfspec:serve", "selfspec serve", "served")


def transformers_server(folder: Path, dtype: str, *, continuous_batching: bool) -> AbstractContextManager[Server]:
    """Run `transformers serve FOLDER`, one request after the other or with continuous batching."""
    kind = "--continuous-batching" if continuous_batching else "--no-continuous-batching"
    program = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", str(folder), "--dtype", dtype, kind]
    name = "transformers:serve" + ("-continuous" if continuous_batching else "")
    label = "transformers serve" + (", continuous batching" if continuous_batching else "")
    return _running(command, name, label, str(folder))


@contextmanager
def _running(command: Sequence[str], name: str, label: str, model: str) -> Iterator[Server]:
    """Start it on a free port, wait until it answers, and end it however the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=errors)
        try:
            server = Server(name=name, label=label, port=port, model=model, process=psutil.Process(process.pid))
            end = time.monotonic() + START_SECONDS
            while not _answers(server):
                if process.poll() is not None or time.monotonic() > end:
                    errors.seek(0)
                    last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                    raise RuntimeError(f"{label} did not start: {' '.join(last) or 'it said nothing'}")
                time.sleep(0.05)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(server: Server) -> bool:
    with suppress(OSError):
        return server.get("/health")[0] == 200
    return False


@contextmanager
def network_folder(network: PreTrainedModel) -> Iterator[Path]:
    """Within it, a temporary folder with a network and a tokenizer that has a word for every id."""
    with tempfile.TemporaryDirectory() as made:
        network.save_pretrained(made)
        words_tokenizer(network.config.vocab_size).save_pretrained(made)
        yield Path(made)


def words_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token i is the word "wi"; words are separated by spaces."""
    words: Any = models.WordLevel({f"w{index}": index for index in range(vocab_size)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
