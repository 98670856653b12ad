"""Settings of what is kept of complete texts, for prompts that begin like them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

MAX_KEPT = 4096
"""Texts that are kept at most, however much memory there is: each also takes some memory besides its rows."""
TOKEN_BYTES = 4
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a text is. A prompt goes on from rows of the same owner's texts only: who is told how many tokens were not read
    again, or takes the time, learns how a text begins.

    lasts: there will be later texts of this owner; else its rows are forgotten as each text ends.
    """

    name: str = ""
    lasts: bool = True


ANYONE = Owner()
"""The owner of all calls of a generator in Python: they are one user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """How much is kept of finished texts, and where it may be used.

    num_bytes: for idle KV caches. The last one stays whatever its size, since the next text needs one. use: "never"; "exact",
    where a kept row has the bits that reading it again would give; or "always".
    """

    num_bytes: int = 0
    use: str = "exact"

    @classmethod
    def of(cls, size: int | str | None) -> PrefixCache:
        """Read a user's size: None for the last text and exact uses only, 0 for none. Raises ValueError for other things."""
        if size is None:
            return cls()
        num_bytes = parse_bytes(size)
        return cls(num_bytes=num_bytes, use="always" if num_bytes else "never")


def parse_bytes(size: int | str, name: str = "prefix_cache") -> int:
    """Read 2000, "2000", "2kB", "1.5 GB" or "1GiB" as bytes. Raises ValueError for anything else. name: of the option."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", size.strip(), re.IGNORECASE) if isinstance(size, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f'{name} must be a number of bytes, or a size such as "500MB" or "2GiB", got {size!r}')
    return int(float(found[1]) * _UNITS[found[2].upper()])


def num_common(tokens: Tensor, prompt: Tensor) -> int:
    """Return the length of the common prefix of two texts, int64 [n] and [m] on the CPU."""
    shorter = min(tokens.numel(), prompt.numel())
    differs = (tokens[:shorter] != prompt[:shorter]).nonzero()
    return int(differs[0]) if len(differs) else shorter


def as_bytes(tokens: Tensor) -> bytes:
    """Return the tokens as bytes, TOKEN_BYTES each. tokens: int64 [n] on the CPU."""
    return tokens.numpy().astype(f"i{TOKEN_BYTES}").tobytes()
