"""How the work of a pass is divided on this machine: threads, cores, NUMA nodes, pieces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.native_layers import Division
from layerskip_models.kernels.threads import Usable, num_threads, processors, usable
from layerskip_models.topology import memory_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    """threads: of our kernels. setting: SELFSPEC_NUM_THREADS, if it is set. usable: what the process may use.

    nodes: the NUMA nodes of these processors, empty where the system tells nothing. division: of a pass of one row; None
    where whole passes do not run on our kernels.
    """

    threads: int
    setting: str | None
    usable: Usable
    nodes: Mapping[int, Sequence[int]]
    division: Division | None

    @classmethod
    def of(cls, model: LayerSkipModel) -> ThreadPlan:
        """What this process would do now with a model on a CPU."""
        steps, threads = model.steps(), num_threads()
        return cls(
            threads=threads,
            setting=os.environ.get("SELFSPEC_NUM_THREADS") or None,
            usable=usable(),
            nodes=memory_nodes(processors()),
            division=None if steps is None else steps.division(1, threads),
        )

    def lines(self) -> list[str]:
        """The plan in words, and what to do about several nodes."""
        own = self.usable
        asked = "" if self.setting is None else f"SELFSPEC_NUM_THREADS={self.setting}; "
        nodes = f", {_counted(len(self.nodes), 'NUMA node')}" if self.nodes else ""
        lines = [
            f"{_counted(self.threads, 'thread')} ({asked}this process may use {_counted(own.cores, 'physical core')} with "
            f"{_counted(own.processors, 'processor')}{nodes})"
        ]
        if self.division is not None:
            lines.append(_in_pieces(self.division))
        if len(self.nodes) > 1:
            node = min(self.nodes)
            lines.append(
                f"these processors belong to NUMA nodes {', '.join(map(str, self.nodes))}, and a node's memory is slow for "
                f"the others: run one process per node, each bound to its own (numactl --cpunodebind={node} --membind={node})"
            )
        return lines


def _in_pieces(division: Division) -> str:
    """A pass of one row."""
    each = [division.qkv, division.output, division.gate_up, division.down]
    return (
        f"a pass of one row is shared by {_counted(division.threads, 'thread')}; the first layer's matrices are divided into "
        f"{', '.join(map(str, each[:-1]))} and {each[-1]} pieces, the head into {division.head}"
    )


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
