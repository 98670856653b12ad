"""`--copy-from FILE`: text files to copy drafts from, read and indexed once per command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from policies import Policy
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import CopyStore
from selfspec.cache.copy_sources import copies_drafts, how_to_copy
from selfspec.cli.prompt_input import decode


def read_copy_files(files: Sequence[Path] | None) -> list[str]:
    """The text of each file. Raises ValueError if one is empty or not UTF-8, OSError if it cannot be read."""
    return [_read(path) for path in files or ()]


def store_of_files(
    generator: SelfSpecGenerator, texts: Sequence[str], policy: Policy | None = None
) -> CopyStore | None:
    """The texts as a copy store for this model; None without texts.

    Raises ValueError if `policy` copies nothing, or if the texts have too few tokens.
    """
    if not texts:
        return None
    if policy is not None and not copies_drafts(policy.observes, generator.runner):
        raise ValueError(f"--copy-from has no effect with policy {policy.name!r}: {how_to_copy(policy)}")
    return generator.copy_store(texts)


def _read(path: Path) -> str:
    try:
        text = decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}: --copy-from takes the path of a UTF-8 text file") from None
    if not text:
        raise ValueError(f"{path} is empty: --copy-from takes a file with the text to copy from")
    return text
