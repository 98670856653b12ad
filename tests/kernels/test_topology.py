"""Processors and cores as the system tells of them, and how many threads follow from that."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from layerskip_models.kernels import threads
from layerskip_models.kernels.threads import num_physical_cores


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
    assert num_physical_cores(tuple(range(8)), folder) == 4
    assert num_physical_cores((1, 3, 5), folder) == 2
    assert num_physical_cores((9, 2), two_sockets / "nothing") == 2


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
    assert threads.usable() == threads.Usable(*expected)
    monkeypatch.setattr(threads, "_usable", threads.usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.delenv("SELFSPEC_NUM_THREADS", raising=False)
    assert threads.num_threads() == expected[1]
    monkeypatch.setenv("SELFSPEC_NUM_THREADS", "16")
    assert threads.num_threads() == expected[0]
