"""Where a number comes from: machine, versions, threads, commit, command. Nothing that names a person or a path."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

import selfspec
from layerskip_models.kernels.check import native_variant

_AMD, _INTEL = "AuthenticAMD", "GenuineIntel"
_GENERATIONS = (
    (_AMD, 0x17, 0x00, 0x07, "Zen"), (_AMD, 0x17, 0x08, 0x08, "Zen+"), (_AMD, 0x17, 0x30, 0x7F, "Zen 2"),
    (_AMD, 0x19, 0x00, 0x0F, "Zen 3"), (_AMD, 0x19, 0x10, 0x1F, "Zen 4"), (_AMD, 0x19, 0x20, 0x5F, "Zen 3"),
    (_AMD, 0x19, 0x60, 0x7F, "Zen 4"), (_AMD, 0x19, 0xA0, 0xAF, "Zen 4"), (_AMD, 0x1A, 0x00, 0x4F, "Zen 5"),
    (_INTEL, 6, 0x3F, 0x3F, "Haswell"), (_INTEL, 6, 0x4F, 0x4F, "Broadwell"),
    (_INTEL, 6, 0x55, 0x55, "Skylake or Cascade Lake"), (_INTEL, 6, 0x6A, 0x6C, "Ice Lake"),
    (_INTEL, 6, 0x8F, 0x8F, "Sapphire Rapids"), (_INTEL, 6, 0xCF, 0xCF, "Emerald Rapids"),
    (_INTEL, 6, 0xAD, 0xAE, "Granite Rapids"),
)  # fmt: skip
"""Vendor, family, first and last model, name: of server processors, and of desktops that share their numbers."""
_POLICY_FILE = re.compile(r"[^+=]*\.py(?=:)")


def provenance(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Everything that another person needs to judge or repeat a measurement; None for what cannot be found out."""
    is_widened = device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)  # our layers multiply in float32
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"selfspec-bench {shlex.join(map(public_argument, sys.argv[1:]))}".strip(),
        "commit": git_commit(Path(__file__).resolve().parent.parent),
        "selfspec": selfspec.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "os": platform.platform(),
        **_processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": native_variant(device, torch.float32 if is_widened else dtype),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": load_average(),  # well above 1: the machine was busy with other things
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(dtype).removeprefix("torch."),
    }


def load_average() -> float:
    """Return how many programs wanted to run at a time, on average of the last minute."""
    return round(psutil.getloadavg()[0], 2)


def policy_files(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return digests of the files whose classes are named as policies, as a part of a record's configuration."""
    found = {file.strip() for name in names for file in _POLICY_FILE.findall(name)}
    digests = {_shortened(file): hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] for file in sorted(found)}
    return {"policy_files": digests} if digests else {}


def public_argument(argument: str) -> str:
    """Strip a command-line argument of this machine's folders, also where a policy's file or an engine's folder is named."""
    argument = _POLICY_FILE.sub(lambda file: _shortened(file[0]), argument)
    engine, colon, folder = argument.rpartition(":")
    return f"{engine}{colon}{_shortened(folder)}"


def _shortened(argument: str) -> str:
    """Make an absolute path relative, or its last part."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _processor() -> dict[str, Any]:
    """Return the processor's name as Linux gives it, and its generation, which virtual machines leave out of the name."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.split("\n"))}
    family, model = (int(fields[name]) if fields.get(name, "").isdecimal() else -1 for name in ("cpu family", "model"))
    own = (fields.get("vendor_id"), family)
    known = (name for *which, first, last, name in _GENERATIONS if own == tuple(which) and first <= model <= last)
    return {"cpu": fields.get("model name") or platform.processor() or None, "microarchitecture": next(known, None)}


def git_commit(folder: Path) -> str | None:
    """Return the commit checked out in a folder that is a repository's root; "+changes" is appended if files differ."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None
