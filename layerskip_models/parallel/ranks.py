"""The processes that hold one model together, and what they tell each other: sums, parts, decisions.

Everything below is torch.distributed: gloo between processors, NCCL between GPUs. A rank that dies or falls silent ends the
run of all with one error, after `timeout_seconds` at the latest.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from layerskip_models.parallel.collectives import gather, sum_in_place
from layerskip_models.parallel.launched import launched_rank

TIMEOUT_SECONDS = 120.0
"""How long a rank waits for the others, unless SELFSPEC_RANK_TIMEOUT says otherwise."""
_ANY_TIME = timedelta(days=365)
SMALL = 1 << 16  # bytes up to which parts are gathered and summed here: fewer steps than a ring's sum takes
_Value = TypeVar("_Value")


class RankError(RuntimeError):
    """The processes of one model cannot go on together. The message says why, and what to do."""


def timeout_seconds() -> float:
    """Raises ValueError for a setting that is no number above 0."""
    given = os.environ.get("SELFSPEC_RANK_TIMEOUT")
    try:
        seconds = TIMEOUT_SECONDS if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"SELFSPEC_RANK_TIMEOUT must be a number of seconds above 0, got {given!r}")
    return seconds


class Ranks:
    """All processes that were launched together, as one group.

    rank, size: of this process, and of the group. device: where tensors that are summed lie. timeout: seconds.
    waiting_seconds: so far between processors, for messages and for ranks that were not as far.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.timeout = timeout_seconds()
        self.waiting_seconds = 0.0
        # For what may take long, since files are read or prompts are shared out: here only an end of a process is an error.
        self._patient = dist.new_group(backend="gloo", timeout=_ANY_TIME)
        # For what rank 0 says when somebody has typed it or a client has sent it. The others wait for that as long as it
        # takes. Rank 0 does not wait for them: they are to listen already.
        patience = timedelta(seconds=self.timeout) if self.rank == 0 else _ANY_TIME
        self._from_first = dist.new_group(backend="gloo", timeout=patience)

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Find the others. Raises RankError if they do not come in time."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with _told(launched_rank(), "the others were not there in time"):
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds()))
        return cls(device)

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape, the same bits on every rank. The given one may be overwritten."""
        if self.size == 1:
            return part
        if part.is_cpu and part.numel() * part.element_size() <= SMALL:
            parts = self.gather(part)
            total = parts[0] + parts[1]
            for more in parts[2:]:  # in the order of ranks, whoever adds
                total += more
            return total
        part = part.contiguous()
        with self.told():
            sum_in_place(part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' tensors of one shape: [ranks, *shape]."""
        started = perf_counter()
        with self.told():
            found = gather(part.contiguous())
        self.waiting_seconds += perf_counter() - started
        return found

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest value that any rank gave of each number, float32 on a CPU; waits as long as it takes."""
        found = numbers.float().clone()
        with self.told():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._patient)
        return found

    def agree(self, numbers: Sequence[float], same: int = 0) -> list[float]:
        """What rank 0 gave, on every rank. same: what must be equal on all of them, below 2^48.

        Raises RankError on every rank if it is not.
        """
        told = self.gather(torch.tensor([float(same), *numbers], dtype=torch.float64, device="cpu"))
        if not bool((told[:, 0] == told[0, 0]).all()):
            others = [rank for rank in range(self.size) if told[rank, 0] != told[0, 0]]
            raise RankError(
                f"rank {', '.join(map(str, others))} decided otherwise than rank 0: all processes must be given the same "
                "model, prompts and options, on machines of one kind"
            )
        return told[0, 1:].tolist()

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank says so."""
        return bool(self.gather(torch.tensor([float(ok)], dtype=torch.float64, device="cpu")).min())

    def collect(self, value: _Value) -> list[_Value]:
        """What every rank gave, in their order, on every rank; however long they take."""
        found: list[Any] = [None] * self.size
        with self.told():
            dist.all_gather_object(found, value, group=self._patient)
        return found

    def from_first(self, make: Callable[[], _Value]) -> _Value:
        """What `make` returns on rank 0, which alone calls it; what it raises there is raised on every rank.

        It may take as long as it likes. The others must be here by `timeout` after it has ended.
        """
        error: Exception | None = None
        found: list[Any] = [None, None]
        if self.rank == 0:
            try:
                found[0] = make()
                pickle.dumps(found[0])
            except Exception as raised:
                error, found = raised, [None, (type(raised), str(raised))]
        with self.told():
            dist.broadcast_object_list(found, src=0, group=self._from_first, device=torch.device("cpu"))
        if error is not None:
            raise error
        if found[1] is not None:
            kind, text = found[1]
            raise _again(kind, text)
        return found[0]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Within it an error of torch.distributed is a RankError."""
        with _told(self.rank, f"another process ended, or did not answer within {self.timeout:g} seconds"):
            yield


def _again(kind: type[Exception], text: str) -> Exception:
    """An error like the one on rank 0."""
    try:
        return kind(text)
    except TypeError:
        return RankError(text)


@contextmanager
def _told(rank: int, why: str) -> Iterator[None]:
    """Errors of torch.distributed in one line."""
    try:
        yield
    except RankError:
        raise
    except (RuntimeError, ValueError) as error:
        text = str(error).strip()
        first = text.splitlines()[0] if text else type(error).__name__
        raise RankError(f"rank {rank} cannot go on: {why} ({first})") from error
