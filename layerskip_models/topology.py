"""What the system says of its processors: which are threads of one core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PROCESSORS = Path("/sys/devices/system/cpu")


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
