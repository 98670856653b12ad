"""The team of threads: the same bits from any number of threads, late ones and several callers among them; fork."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor

from batched_runs import in_threads
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


def _multiply(count: int, seconds: float) -> None:
    """For so long on so many threads, by a matrix that is large enough to wake a helper."""
    linear, x, end = NativeLinear(torch.randn(1024, 512)), torch.randn(1, 512), monotonic() + seconds
    with threads.on_threads(count):
        while monotonic() < end:
            linear(x)


def _threads_now() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _turns_beside_single_threads() -> int:
    """How often other threads of a process with one core woke within 0.4 s in which jobs were for one thread only."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

    def turns() -> int:
        status = [Path(f"/proc/self/task/{task}/status") for task in _threads_now() - {os.getpid()}]
        lines = [line for path in status for line in path.read_text(encoding="utf-8").splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

    _multiply(2, 0.1)
    _multiply(1, 0.2)
    before = turns()
    _multiply(1, 0.4)
    return turns() - before


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
    before = _threads_now()
    _multiply(2, 0.05)
    (helper,) = _threads_now() - before
    os.sched_setaffinity(helper, [own])
    _multiply(2, 0.05)
    os.sched_setaffinity(helper, cores)
    ran = set()
    for _ in range(20):
        _multiply(2, 0.01)
        ran.add(int(Path(f"/proc/self/task/{helper}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[36]))
    late = monotonic() + 10
    while os.sched_getaffinity(helper) != cores and monotonic() < late:
        sleep(0.01)  # it may be on its way from a core
    return own, ran, os.sched_getaffinity(helper)


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

    in_threads([call] * 4)
    assert results == [True] * 4


@needs_native
def test_a_forked_child_has_a_team_of_its_own(model: LayerSkipModel, alone: Tensor) -> None:
    with threads.on_threads(3):
        assert torch.equal(passes(model), alone)
        assert results_of(1, lambda: torch.equal(passes(model), alone)) == [True]
        assert torch.equal(passes(model), alone)


@needs_native
def test_what_a_late_thread_reads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = [7]
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


@pytest.mark.parametrize("setting", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"])
@pytest.mark.parametrize("own", [None, "2"])
def test_a_setting_of_openmp_that_leaves_one_core_is_one_warning(
    setting: str, own: str | None, four_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds the thread that loads PyTorch, before this package is loaded."""
    for name in (*threads._BINDING, "SELFSPEC_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv("SELFSPEC_NUM_THREADS", own)
    for usable, bound, warned in ((1, False, 0), (1, True, 1), (2, True, 0)):
        monkeypatch.setattr(threads, "_usable", partial(threads.Usable, usable, usable))
        if bound:
            monkeypatch.setenv(setting, "close")
        threads._warn_of_binding.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert threads.num_threads() == threads.num_threads() == usable
        found = [str(warning.message) for warning in caught]
        assert len(found) == warned and all(f"{setting}=close binds this thread to one core" in one for one in found)


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


# How many threads


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Eight processors in two sockets that take turns, as systems often number them; 0 and 4 are threads of one core."""
    for number in range(8):
        own = tmp_path / "cpu" / f"cpu{number}" / "topology"
        own.mkdir(parents=True)
        (own / "physical_package_id").write_text(f"{number % 2}\n")
        (own / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return tmp_path


def test_threads_of_a_core_count_once(two_sockets: Path) -> None:
    folder = two_sockets / "cpu"
    assert threads.num_physical_cores(tuple(range(8)), folder) == 4
    assert threads.num_physical_cores((1, 3, 5), folder) == 2
    assert threads.num_physical_cores((9, 2), two_sockets / "nothing") == 2


@pytest.mark.parametrize(
    ("mask", "quota", "expected"),
    [
        (range(8), None, (8, 4)),
        ((0, 4), None, (2, 1)),  # both threads of one core
        ((0, 1, 4), None, (3, 2)),
        (range(8), 2.5, (3, 3)),
        (range(8), 0.2, (1, 1)),
        (range(4), 100.0, (4, 4)),
    ],
)
def test_one_thread_per_physical_core_within_mask_and_quota(
    mask: tuple[int, ...], quota: float | None, expected: tuple[int, int], two_sockets: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(threads, "processors", lambda: tuple(mask))
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(threads, "num_physical_cores", partial(threads.num_physical_cores, folder=two_sockets / "cpu"))
    assert threads.usable() == threads.Usable(*expected)
    monkeypatch.setattr(threads, "_usable", threads.usable)
    monkeypatch.delenv("SELFSPEC_NUM_THREADS", raising=False)
    for own in (1, 16):  # PyTorch's number, but at most one for each physical core
        monkeypatch.setattr(torch, "get_num_threads", partial(int, own))
        assert threads.num_threads() == min(own, expected[1])
    for asked, given in (("16", expected[0]), ("1", 1)):  # what was asked for, but none without a processor
        monkeypatch.setenv("SELFSPEC_NUM_THREADS", asked)
        assert threads.num_threads() == given
    monkeypatch.setenv("SELFSPEC_NUM_THREADS", "none")
    with pytest.raises(ValueError, match="SELFSPEC_NUM_THREADS"):
        threads.num_threads()


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


def test_a_context_that_was_left_by_an_interrupt_is_over() -> None:
    """As when Ctrl-C comes at the first instruction of `__exit__`: the next context starts from what was before."""
    before = threads.num_threads()
    threads.SingleThreadedOperators().__enter__()
    assert threads._here.threads == before
    with threads.SingleThreadedOperators(), threads.SingleThreadedOperators():
        assert threads._here.threads == before
    assert threads._here.threads is None
