"""Which code a record's numbers depend on, and whether it has changed since they were measured.

A record keeps a digest of each part of the code. A part is a group of files; its digest takes what the files do, not what
they say: comments, docstrings and empty lines count for nothing. Whoever reads the record later compares these digests with
those of the code beside it, so that neither git nor its history is needed.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.record import Line
from layerskip_models import DEMO_PATH

ROOT = Path(__file__).resolve().parent.parent

_MEASURING = ("bench/datasets.py", "bench/engines/own.py", "bench/measure.py", "bench/workers.py")
PARTS: dict[str, tuple[str, ...]] = {
    "kernels": ("layerskip_models/kernels/*.py", "layerskip_models/kernels/*.c", "layerskip_models/kernels/*.h"),
    "model": ("layerskip_models/*.py", "layerskip_models/backends/*.py", "layerskip_models/families/*.py"),
    "loading": ("layerskip_models/checkpoints/*.py",),
    "engine": ("selfspec/generator.py", "selfspec/engine/*.py", "selfspec/engine/runners/*.py", "selfspec/cache/*.py"),
    "captured rounds": ("selfspec/engine/runners/cuda_graph/*.py",),
    "batches": ("selfspec/batch.py",),
    "policies": ("policies/*.py", "policies/auto/*.py"),
    "pre-verifier": ("selfspec/pacer/inference.py", "selfspec/pacer/network.py"),
    "exit adapters": ("layerskip_models/exits/*.py", "selfspec/exits/*.py"),
    "training": ("layerskip_models/training/*.py",),
    "server": ("selfspec/serve/*.py",),
    "replay": ("bench/grid.py", "bench/sweep.py", "selfspec/analysis/replay.py"),
    "peers": ("bench/engines/*.py",),
    "measuring": (*_MEASURING, "bench/run.py"),
    "machine": ("bench/machine/*.py",),
    **{
        f"study {name}": (f"bench/experiments/{name}/*.py",)
        for name in (
            "answers",
            "attention",
            "bounded_exits",
            "busy",
            "copying",
            "cores",
            "draws",
            "exit_adapters",
            "exit_losses",
            "fewer_bits",
            "ladder",
            "loading",
            "predictions",
            "online_exits",
            "row_parts",
            "settings",
            "spide",
            "steered_exits",
            "variants",
        )
    },
}
"""The parts by name: patterns of files below the root. Tables are made anew from a record's lines, so they are no part."""

_DECODING = ("kernels", "model", "engine", "policies", "measuring")
DEPENDS: dict[str, tuple[str, ...]] = {
    "run": (*_DECODING, "replay"),
    "sweep": (*_DECODING, "replay"),
    "peers": (*_DECODING, "peers"),
    "peers --converted": (*_DECODING, "loading", "batches", "peers", "machine"),
    "chat": (*_DECODING, "loading", "peers"),
    "context": (*_DECODING, "machine"),
    "roofline": (*_DECODING, "machine"),
    "batch": (*_DECODING, "batches", "machine"),
    "serving": (*_DECODING, "batches", "server", "machine"),
    "attention": ("kernels", "study attention"),
    "busy": (*_DECODING, "study busy"),
    "ladder": (*_DECODING, "replay", "study settings", "study ladder"),
    "loading": ("kernels", "model", "loading", "study loading"),
    "copying-gain": (*_DECODING, "study copying"),
    "exit-adapters": (*_DECODING, "exit adapters", "study exit_adapters"),
    "judge-exits": ("kernels", "model", "engine", "exit adapters", "study exit_adapters"),
    "online-exits": ("kernels", "model", "engine", "exit adapters", "study online_exits"),
    "steered-exits": (*_DECODING, "exit adapters", "study exit_adapters", "study steered_exits"),
    "exit-losses": ("model", "training", "study exit_losses"),
    "draft-copies": ("kernels", "model", "loading", "study fewer_bits"),
    "fine-tune": ("kernels", "model", "engine", "policies", "study fewer_bits"),
    "roundings": ("kernels", "model", "study fewer_bits"),
    "answers": (*_DECODING, "study answers"),
    "cores": (*_DECODING, "study cores"),
    "draws": ("kernels", "engine", "study draws"),
    "row-parts": ("study row_parts",),
    "settings": (*_DECODING, "replay", "study settings"),
    "predictions": ("study predictions",),
    "variants": ("kernels", "model", "engine", "policies", "batches", "study variants"),
    "bounded-exits": (*_DECODING, "study bounded_exits", "study settings"),
    "spide": ("kernels", "model", "engine", "policies", "pre-verifier", "study spide"),
}
"""By the command that wrote a record: the parts that decide its numbers."""
WEIGHTS = "the demo's weights"


def parts_of(lines: Sequence[Line]) -> tuple[str, ...]:
    """The parts that decide this record's numbers; with a trained pre-verifier or on a GPU there are more.

    Raises ValueError for a command that `DEPENDS` does not have.
    """
    first = lines[0]
    if first["command"] not in DEPENDS:
        raise ValueError(
            f"bench/sources.py does not say what records of {first['command']!r} depend on: add it to DEPENDS"
        )
    more = ("pre-verifier",) if any("pacer" in name for name in first.get("engines") or ()) else ()
    on_gpu = ("captured rounds",) if first["provenance"]["device"] != "cpu" else ()
    return (*DEPENDS[first["command"]], *more, *on_gpu)


def changed_parts(lines: Sequence[Line]) -> list[str] | None:
    """The parts that are not what they were when this record was made; None if it does not say what they were."""
    then = lines[0]["provenance"].get("sources")
    if then is None:
        return None
    now = sources()
    changed = [part for part in parts_of(lines) if now is None or then.get(part) != now[part]]
    configuration = lines[0]["configuration"]
    if configuration["model"] == "the demo model" and configuration["weights_digest"] not in (None, _demo_weights()):
        changed.append(WEIGHTS)
    return changed


def age(lines: Sequence[Line]) -> str:
    """Whether a record's code is still what it was, in a phrase."""
    changed = changed_parts(lines)
    if changed is None:
        return "**old**: nothing says which code it measured"
    if not changed:
        return "not changed since"
    return f"**old**: changed since in {', '.join(changed)}"


@lru_cache
def sources() -> dict[str, str] | None:
    """A digest of each part as it is here; None outside a checkout, since a wheel has no C sources."""
    if not (ROOT / "setup.py").exists():
        return None
    return digests({str(path.relative_to(ROOT)): path.read_bytes() for path in _files(ROOT)})


def sources_at(commit: str) -> dict[str, str] | None:
    """A digest of each part as it was at a commit; None if git or the commit is not here."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True, timeout=60).stdout

    try:
        listed = git("ls-tree", "-r", "--name-only", commit).decode().splitlines()
        wanted = [name for name in listed if any(_belongs(name, part) for part in PARTS)]
        return digests({name: git("show", f"{commit}:{name}") for name in wanted})
    except (OSError, subprocess.SubprocessError):
        return None


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """A digest of each part, 12 hexadecimal digits. files: their bytes by path below the root."""
    found = {}
    for part in PARTS:
        summary = sha256()
        for name in sorted(name for name in files if _belongs(name, part)):
            summary.update(f"{name}\0{substance(name, files[name].decode())}\0".encode())
        found[part] = summary.hexdigest()[:12]
    return found


def substance(name: str, text: str) -> str:
    """A file's text without comments, docstrings and empty lines."""
    if name.endswith((".c", ".h")):
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        text = re.sub(r"//[^\n]*", "", text)
        return "\n".join(line for line in map(str.strip, text.split("\n")) if line)
    lines = text.split("\n")
    for first, last in _docstrings(ast.parse(text)):
        lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _docstrings(tree: ast.Module) -> Iterable[tuple[int, int]]:
    """First and last line of each string that stands alone, which are those of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            yield node.lineno, node.end_lineno


def _belongs(name: str, part: str) -> bool:
    path = Path(name)
    return any(str(path.parent) == str(Path(pattern).parent) and path.match(pattern) for pattern in PARTS[part])


def _files(root: Path) -> set[Path]:
    return {path for patterns in PARTS.values() for pattern in patterns for path in root.glob(pattern)}


@lru_cache
def _demo_weights() -> str | None:
    from bench.provenance import weights_digest  # it imports this module

    return weights_digest(DEMO_PATH)


def with_sources(first: Line) -> Line:
    """A record's first line with the digests that git's history has for its commit; as it is where it has some already."""
    where: dict[str, Any] = first["provenance"]
    if "sources" in where or where["commit"] is None:
        return first
    found = sources_at(where["commit"].removesuffix("+changes"))
    return first if found is None else {**first, "provenance": {**where, "sources": found}}
