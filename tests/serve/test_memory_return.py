"""Memory that was freed between live blocks leaves the process, and where the C library cannot do that nothing happens."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading

import pytest

from layerskip_models import DEMO_PATH
from running_server import running_server
from selfspec import SelfSpecGenerator
from selfspec.serve import memory_return
from selfspec.serve.memory_return import MemoryReturn, find_trim

# Four threads take 240 MB in blocks that are too small to be mapped one by one, and keep every 50th, so most of what they
# free lies between live blocks. argv: whether memory is given back. Prints resident MB before and after.
_FREES_IN_THREADS = """
import sys, threading, time
from selfspec.serve.memory_return import MemoryReturn

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

kept = []
def work():
    blocks = [bytearray(b"x") * 60_000 for _ in range(1000)]
    kept.append(blocks[::50])

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
freed = resident()
memory = MemoryReturn(seconds=0.05) if sys.argv[1] == "True" else None
end = time.monotonic() + (10 if memory else 1)
while time.monotonic() < end and resident() > freed - 100:
    time.sleep(0.05)
print(freed, resident())
"""


def resident_after_freeing(gives_back: bool) -> tuple[int, int]:
    command = [sys.executable, "-c", _FREES_IN_THREADS, str(gives_back)]
    freed, end = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return int(freed), int(end)


@pytest.mark.skipif(find_trim() is None, reason="the C library has no malloc_trim")
def test_what_threads_have_freed_leaves_the_process() -> None:
    """The C library by itself keeps it, or this test would prove nothing."""
    freed, end = resident_after_freeing(False)
    assert end > freed - 20
    freed, end = resident_after_freeing(True)
    assert end <= freed - 100


def test_it_goes_on_until_it_is_closed() -> None:
    times: list[int] = []
    enough = threading.Event()

    def trim() -> None:
        times.append(1)
        if len(times) == 3:
            enough.set()

    memory = MemoryReturn(trim, seconds=0.01)
    assert enough.wait(10)
    memory.close()
    assert not any(thread.name == "selfspec-memory" for thread in threading.enumerate())


def test_without_malloc_trim_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on musl, whose library has no such function, and on other systems."""

    def no_library(name: str | None) -> object:
        return object()

    monkeypatch.setattr(memory_return.sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert find_trim() is None
    monkeypatch.undo()
    monkeypatch.setattr(memory_return.sys, "platform", "darwin")
    assert find_trim() is None
    before = threading.active_count()
    memory = MemoryReturn(seconds=0.01)
    assert threading.active_count() == before
    memory.close()


def test_a_server_gives_memory_back_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(memory_return, "find_trim", lambda: given_back.set)
    monkeypatch.setattr(memory_return, "PAUSE_SECONDS", 0.05)
    with running_server(SelfSpecGenerator.from_pretrained(DEMO_PATH)):
        assert given_back.wait(10)
    assert not any(thread.name == "selfspec-memory" for thread in threading.enumerate())


def test_a_full_collection_leaves_alone_what_was_there_before_the_server() -> None:
    """Afterwards the collector looks at everything again."""
    generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
    gc.unfreeze()  # what the tests before this one had frozen
    before = len(gc.get_objects())
    with running_server(generator, freezes=True):
        assert gc.get_freeze_count() > before / 2
        assert len(gc.get_objects()) < before / 2
    assert gc.get_freeze_count() == 0
