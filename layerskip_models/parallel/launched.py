"""How many processes were launched together, and which of them this is. Nothing is imported for it but the environment."""

from __future__ import annotations

import os


def launched_ranks() -> int:
    """How many processes were launched together with this one (torchrun says so); 1 for a process by itself."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which it is of those on this machine, from 0: the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
