"""What the system says of its processors: which are threads of one core, and which memory is near them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PROCESSORS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")


def physical_cores(numbers: Sequence[int], folder: Path = PROCESSORS) -> list[list[int]]:
    """The system's numbers of processors, together where they are threads of one core; cores of a socket are neighbours.

    A processor of which the system tells nothing is a core of its own.
    """
    cores: dict[tuple[str, str], list[int]] = {}
    for number in sorted(numbers):
        try:
            topology = folder / f"cpu{number}" / "topology"
            socket, threads = (
                (topology / name).read_text(encoding="utf-8").strip()
                for name in ("physical_package_id", "thread_siblings_list")
            )
        except OSError:
            socket, threads = "", str(number)
        cores.setdefault((socket, threads), []).append(number)
    # Sorting keeps the order of a socket's cores, and sockets in the order of their first.
    sockets = list(dict.fromkeys(socket for socket, _ in cores))
    return [cores[key] for key in sorted(cores, key=lambda key: sockets.index(key[0]))]


def memory_nodes(numbers: Sequence[int], folder: Path = NODES) -> dict[int, list[int]]:
    """The NUMA nodes that some of these processors belong to, with those processors, by the nodes' numbers.

    Empty where the system tells nothing of nodes.
    """
    wanted, found = set(numbers), {}
    for node in folder.glob("node[0-9]*"):
        try:
            own = wanted & numbers_of((node / "cpulist").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if own:
            found[int(node.name.removeprefix("node"))] = sorted(own)
    return dict(sorted(found.items()))


def numbers_of(text: str) -> set[int]:
    """The numbers in a list as Linux writes it, such as "0-3,8". Raises ValueError if it is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            found |= set(range(int(first), int(last or first) + 1))
    return found
