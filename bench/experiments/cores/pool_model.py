"""A model of what the team of threads costs on machines with more cores than those that are measured on.

A phase ends for a thread when it has seen that all others are done: one transfer of a line of memory before its own mark is
out, and one for every other thread's mark. A core reads some of these at a time. The model leaves out that a line which many
cores read is given to one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerskip_models.checkpoints.synthetic import SHAPES

LAYER_PHASES = 6  # as in kernels.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """near, far, other: seconds of a transfer between cores with a common cache, within a socket, between sockets.

    group: cores with a common cache. socket: cores of a socket. thread_bytes, socket_bytes: bytes per second that a thread
    and a socket read at most. Only `near` and `thread_bytes` can be measured on two cores; the rest is assumed.
    """

    near: float
    thread_bytes: float
    far: float = 110e-9
    other: float = 220e-9
    group: int = 8
    socket: int = 32
    socket_bytes: float = 250e9

    def transfer(self, threads: int) -> float:
        """Mean seconds of a transfer from one of the others, where threads fill one group and one socket after the other."""
        others = max(threads - 1, 1)
        near = min(others, self.group - 1)
        far = min(others, self.socket - 1) - near
        return (near * self.near + far * self.far + (others - near - far) * self.other) / others

    def phase(self, threads: int, at_a_time: int) -> float:
        """Seconds that a phase of empty pieces takes. at_a_time: marks that a core reads at a time."""
        return 0.0 if threads == 1 else self.transfer(threads) * (1 + (threads - 1) / at_a_time)

    def reading(self, threads: int, num_bytes: float) -> float:
        """Seconds to read this much."""
        sockets = -(-threads // self.socket)
        return num_bytes / min(threads * self.thread_bytes, sockets * self.socket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass of one row: the bytes that it reads, and its phases."""

    num_bytes: float
    phases: int

    @classmethod
    def of(cls, shape: str, bytes_per_weight: float) -> Pass:
        """The pass that begins a text, for a model of one of the shapes of synthetic weights."""
        sizes = SHAPES[shape]
        hidden, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
        dim = sizes.get("head_dim", hidden // heads)
        attention = hidden * dim * (2 * heads + 2 * sizes["num_key_value_heads"])
        weights = layers * (attention + 3 * hidden * sizes["intermediate_size"]) + sizes["vocab_size"] * hidden
        return cls(num_bytes=bytes_per_weight * weights, phases=LAYER_PHASES * layers + 1)

    def share(self, machine: Machine, threads: int, at_a_time: int) -> float:
        """What part of the pass the team costs."""
        cost = self.phases * machine.phase(threads, at_a_time)
        return cost / (cost + machine.reading(threads, self.num_bytes))
