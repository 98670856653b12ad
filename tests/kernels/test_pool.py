"""The team of threads: the same bits from any number of threads, late ones and several callers among them; fork and exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor

from busy_processes import busy_processes
from launched_processes import results_of
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kernels import threads
from layerskip_models.kernels.check import native_works
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from tiny_llama import VOCAB_SIZE, tiny_llama

needs_native = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")


@pytest.fixture(scope="module")
def model() -> LayerSkipModel:
    llama = tiny_llama(seed=8, hidden_size=96, intermediate_size=160, heads=6, kv_heads=3, max_position_embeddings=256)
    return from_transformers(llama, layout="native")


def passes(model: LayerSkipModel) -> Tensor:
    """Logits of a text that is run in pieces of several sizes, then of several texts whose rows share passes and steps."""
    tokens = torch.randint(0, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(2))
    cache, logits = KVCache(model, len(tokens)), []
    with torch.inference_mode():
        for part in tokens.split([20, 1, 1, 7, 1, 30]):
            hidden = model.run_layers(model.embed(part), 0, model.num_layers, cache)
            logits.append(model.logits(hidden))
        caches = [KVCache(model, 40) for _ in range(5)]
        steps = model.steps()
        assert steps is not None
        for sizes in ([1, 17, 1, 9, 3], [1, 1, 1, 1, 1], [20, 2, 1, 1, 8]):
            hidden = model.embed(tokens[: sum(sizes)])
            logits.append(model.logits(model.run_layers(hidden, 0, model.num_layers, [*zip(caches, sizes)])))
            last = torch.empty(5, model.hidden_size)
            steps.tokens([1, 2, 3, 4, 5], [(one, 1) for one in caches], model.num_layers, last, head="full")
            logits.append(model.logits(last))
    rows = [one.keys[..., : one.length].flatten()[-VOCAB_SIZE:].unsqueeze(0) for one in (cache, *caches)]
    return torch.cat([*logits, *rows])


@pytest.fixture(scope="module")
def alone(model: LayerSkipModel) -> Tensor:
    """What one thread computes."""
    with threads.on_threads(1):
        return passes(model)


@needs_native
@pytest.mark.parametrize("count", [2, 3, 5, 8, 16, 32, 64])
def test_the_same_bits_on_any_number_of_threads(count: int, model: LayerSkipModel, alone: Tensor) -> None:
    """More threads than cores: some lose theirs in the middle of a piece, and come back when the text is elsewhere."""
    for busy in (0, 1):
        with busy_processes(busy, 30), threads.on_threads(count):
            for _ in range(10):
                assert torch.equal(passes(model), alone)
    threads.reclaim_buffers()
    assert not threads._kept


def _turns_beside_single_threads() -> int:
    """How often other threads of a process with one core woke within 0.4 s in which jobs were for one thread only."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    linear, x = NativeLinear(torch.randn(64, 64)), torch.randn(1, 64)

    def run(count: int, seconds: float) -> None:
        end = monotonic() + seconds
        with threads.on_threads(count):
            while monotonic() < end:
                linear(x)

    def seq_rounds() -> int:
        others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
        lines = [line for task in others for line in (task / "status").read_text(encoding="utf-8").splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

    run(2, 0.1)
    run(1, 0.2)
    before = seq_rounds()
    run(1, 0.4)
    return seq_rounds() - before


@needs_native
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no such setting here")
def test_a_helper_that_shares_the_only_core_sleeps() -> None:
    """It was woken for a job of two threads; those that follow are for one, and it does not look for more all the time."""
    (found,) = results_of(1, _turns_beside_single_threads)
    assert found < 40  # looking every millisecond it has hundreds


def _cores_of_a_helper() -> tuple[int, set[int], set[int]]:
    """The owner's core; where its helper ran after it had shared that core and might leave it; what it may use then."""
    cores = os.sched_getaffinity(0)
    own = min(cores)
    os.sched_setaffinity(0, [own])
    linear, x = NativeLinear(torch.randn(1024, 512)), torch.randn(1, 512)  # large enough to wake a helper
    before = _threads_now()

    def run(seconds: float) -> None:
        end = monotonic() + seconds
        with threads.on_threads(2):
            while monotonic() < end:
                linear(x)

    run(0.05)
    (helper,) = _threads_now() - before
    os.sched_setaffinity(helper, [own])
    run(0.05)
    os.sched_setaffinity(helper, cores)
    ran = set()
    for _ in range(20):
        run(0.01)
        ran.add(int(Path(f"/proc/self/task/{helper}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[36]))
    late = monotonic() + 10
    while os.sched_getaffinity(helper) != cores and monotonic() < late:
        sleep(0.01)  # it may be on its way from a core
    return own, ran, os.sched_getaffinity(helper)


def _threads_now() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@needs_native
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no such setting here")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is no other core")
def test_a_helper_leaves_the_owners_core_for_an_idle_one() -> None:
    """A helper that naps waits for no core, so the scheduler may leave both on one for as long as a text takes."""
    cores = os.sched_getaffinity(0)
    ((own, ran, allowed),) = results_of(1, _cores_of_a_helper)
    assert ran - {own}
    assert allowed == cores


@needs_native
def test_several_callers_at_a_time(model: LayerSkipModel, alone: Tensor) -> None:
    """One has the team, the others work alone rather than wait."""
    results: list[bool] = []

    def call() -> None:
        with threads.on_threads(3):
            results.append(all(torch.equal(passes(model), alone) for _ in range(10)))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [True] * 4


PROGRAM = """
import os, torch
from layerskip_models.kernels import threads
from layerskip_models.kernels.native_linear import NativeLinear
threads._here.threads = 3
linear, x = NativeLinear(torch.randn(300, 64)), torch.randn(3, 64)
expected = linear(x)
"""


def run(program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + program]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[2])


@needs_native
def test_a_forked_child_has_a_team_of_its_own_and_a_process_ends_beside_one() -> None:
    run("""
child = os.fork()
if child == 0:
    same = all(torch.equal(linear(x), expected) for _ in range(100))
    os._exit(0 if same else 1)
assert all(torch.equal(linear(x), expected) for _ in range(100))
assert os.waitpid(child, 0)[1] == 0
""")


@needs_native
def test_what_a_late_thread_reads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = [7]
    monkeypatch.setattr(threads, "_kept", deque())
    monkeypatch.setattr(threads, "pool_oldest", lambda: lambda: inside[0])
    monkeypatch.setattr(threads, "_kept", deque())  # without what earlier tests left there
    threads.keep(7, "a")
    threads.keep(8, "b")
    assert [needed for _, needed in threads._kept] == [("a",), ("b",)]
    inside[0] = 8
    threads.keep(9, "c")
    assert [job for job, _ in threads._kept] == [8, 9]
    inside[0] = 1 << 62
    threads.reclaim_buffers()
    assert not threads._kept
    with pytest.raises(MemoryError):
        threads.keep(-1)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_which_number_of_threads_counts(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFSPEC_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_usable", lambda: threads.Usable(128, 64))
    assert threads.num_threads() == 4  # PyTorch's
    monkeypatch.setattr(threads, "_usable", lambda: threads.Usable(6, 3))
    assert threads.num_threads() == 3  # one per physical core that the process may use
    for asked, given in (("2", 2), ("5", 5), ("7", 6)):  # what was asked for, but none without a processor
        monkeypatch.setenv("SELFSPEC_NUM_THREADS", asked)
        assert threads.num_threads() == given
    monkeypatch.setenv("SELFSPEC_NUM_THREADS", "none")
    with pytest.raises(ValueError, match="SELFSPEC_NUM_THREADS"):
        threads.num_threads()


@pytest.mark.parametrize("setting", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"])
@pytest.mark.parametrize("own", [None, "2"])
def test_a_setting_of_openmp_that_leaves_one_core_is_one_warning(
    setting: str, own: str | None, four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds the thread that loads PyTorch, before this package is loaded."""
    monkeypatch.delenv("SELFSPEC_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("SELFSPEC_NUM_THREADS", own)
    monkeypatch.setattr(threads, "_usable", lambda: threads.Usable(1, 1))
    for name in threads._BINDING:
        monkeypatch.delenv(name, raising=False)
    threads._warn_of_binding.cache_clear()
    assert threads.num_threads() == 1
    threads._warn_of_binding.cache_clear()
    monkeypatch.setenv(setting, "close")
    with pytest.warns(RuntimeWarning, match=f"{setting}=close binds this thread to one core") as caught:
        assert threads.num_threads() == threads.num_threads() == 1
    assert len(caught) == 1
    monkeypatch.setattr(threads, "_usable", lambda: threads.Usable(2, 2))
    threads._warn_of_binding.cache_clear()
    assert threads.num_threads() == 2


@needs_native
def test_operators_start_no_team_within_a_round(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFSPEC_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_usable", lambda: threads.Usable(64, 64))
    elsewhere: list[int] = []
    with threads.SingleThreadedOperators():
        assert (torch.get_num_threads(), threads.num_threads()) == (1, 4)
        other = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        other.start()
        other.join()
        with threads.SingleThreadedOperators():
            assert (torch.get_num_threads(), threads.num_threads()) == (1, 4)
        assert threads.num_threads() == 4
    assert torch.get_num_threads() == 4 and elsewhere == [4]


@needs_native
def test_a_streamer_has_the_callers_threads(four_threads: None, model: LayerSkipModel) -> None:
    seen: list[int] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            seen.append(torch.get_num_threads())

        def end(self) -> None:
            pass

    SelfSpecGenerator(model, policy="ls:2-3").generate([1, 2, 3], max_new_tokens=8, streamer=Streamer())
    assert set(seen) == {4}


@pytest.mark.parametrize(
    ("files", "group", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"a/cpu.max": "max 100000\n", "a/b/cpu.max": "50000 100000\n"}, "0::/a/b\n", 0.5),
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "300000 100000\n"}, "0::/a/b\n", 2.0),
        ({"cpu.max": "400000 100000\n"}, "0::/outside/of/the/container\n", 4.0),
        (
            {"cpu,cpuacct/j/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/j/cpu.cfs_period_us": "100000\n"},
            "5:memory:/j\n4:cpu,cpuacct:/j\n",
            2.5,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu:/\n", None),
        ({}, "0::/\n", None),
    ],
)  # fmt: skip
def test_the_control_groups_quota(files: dict[str, str], group: str, cores: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "own"
    own.write_text(group)
    assert threads.cpu_quota.__wrapped__(tmp_path / "root", own) == cores
    assert threads.cpu_quota.__wrapped__(tmp_path / "root", tmp_path / "missing") is None
