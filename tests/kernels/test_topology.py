"""Processors and cores as the system tells of them, and how many threads follow from that."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from layerskip_models import from_transformers
from layerskip_models.kernels import threads
from layerskip_models.kernels.check import native_works
from layerskip_models.topology import num_physical_cores
from tiny_llama import tiny_llama

needs_native = pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Eight processors, two threads to a core, in two sockets. 0 and 4 are threads of one core, and sockets take turns, as
    systems often number them."""
    for number in range(8):
        own = tmp_path / "cpu" / f"cpu{number}" / "topology"
        own.mkdir(parents=True)
        (own / "physical_package_id").write_text(f"{number % 2}\n")
        (own / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return tmp_path


def test_threads_of_a_core_count_once(two_sockets: Path) -> None:
    folder = two_sockets / "cpu"
    assert num_physical_cores(range(8), folder) == 4
    assert num_physical_cores([1, 3, 5], folder) == 2
    assert num_physical_cores([9, 2], two_sockets / "nothing") == 2


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
    mask: tuple[int, ...],
    quota: float | None,
    expected: tuple[int, int],
    two_sockets: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "processors", lambda: tuple(mask))
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(threads, "num_physical_cores", partial(num_physical_cores, folder=two_sockets / "cpu"))
    threads._num_cores.cache_clear()
    assert threads.usable() == threads.Usable(*expected)
    monkeypatch.setattr(threads, "_usable", threads.usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.delenv("SELFSPEC_NUM_THREADS", raising=False)
    assert threads.num_threads() == expected[1]
    monkeypatch.setenv("SELFSPEC_NUM_THREADS", "16")
    assert threads.num_threads() == expected[0]
    threads._num_cores.cache_clear()


@needs_native
def test_a_small_model_is_not_divided_among_many_threads() -> None:
    steps = from_transformers(tiny_llama(seed=4)).steps()
    assert steps is not None
    alone, few, many = (steps.division(1, count) for count in (1, 2, 64))
    assert alone.threads == 1
    assert few.threads == 2
    # Its layers have some kilobytes: with k threads that takes bytes / k, and k looks at one another.
    assert 2 <= many.threads < 16
    assert all(1 <= count <= 2 * many.threads for count in (many.qkv, many.output, many.gate_up, many.down))
    # 64 rows are more work than one.
    assert steps.division(64, 64).threads > many.threads


def test_the_system_s_own_folder() -> None:
    """What it says of this machine's processors: at least a core, and no more than there are processors."""
    mine = threads.processors()
    assert 1 <= num_physical_cores(mine) <= len(mine)
