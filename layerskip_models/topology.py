"""What the system says of its processors: which are threads of one core."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROCESSORS = Path("/sys/devices/system/cpu")


def num_physical_cores(numbers: Iterable[int], folder: Path = PROCESSORS) -> int:
    """Count the cores that these processors are threads of. One of which the system tells nothing is a core of its own."""
    cores: set[tuple[str, str]] = set()
    for number in numbers:
        try:
            topology = folder / f"cpu{number}" / "topology"
            socket, threads = (
                (topology / name).read_text(encoding="utf-8").strip()
                for name in ("physical_package_id", "thread_siblings_list")
            )
        except OSError:
            socket, threads = "", str(number)
        cores.add((socket, threads))
    return len(cores)
