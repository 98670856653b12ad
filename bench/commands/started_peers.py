"""Peers of a command, each in a process of its own, and the record without those that were lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import typer

from bench.commands.preparation import progress, recording
from bench.datasets import EncodedPrompt
from bench.engines.own import EngineLostError, TimedEngine
from bench.engines.peer_process import Peer, PeerProcess, StartMethod
from bench.measure import measure, num_runs
from bench.record import Line, RecordWriter

START_METHOD: StartMethod = "spawn"


def start(name: str, make: Callable[[], Peer], timeout: float, running: ExitStack) -> PeerProcess:
    """One of them, until `running` is left. Raises EngineLostError if it cannot be made."""
    return running.enter_context(PeerProcess(name, make, timeout=timeout, start_method=START_METHOD))


def start_all(
    peers: Mapping[str, Callable[[], Peer]], timeout: float, running: ExitStack
) -> tuple[list[PeerProcess], dict[str, str]]:
    """Those that can be made, and why the others cannot, by name."""
    started, missing = [], {}
    for name, make in peers.items():
        try:
            started.append(start(name, make, timeout, running))
        except EngineLostError as error:
            missing[name] = str(error)
    return started, missing


def versions_of(started: Sequence[PeerProcess]) -> dict[str, Any]:
    """Return the versions of other engines that the peers loaded, as a record's provenance names them."""
    return {name: version for peer in started for name, version in peer.about.get("versions", {}).items()}


def without_lost(lines: Sequence[Line], missing: Mapping[str, str], lost: Mapping[str, str]) -> list[Line]:
    """Return the record without the engines that were lost before their last run; a line for each says why.

    missing: peers that never began, by name. lost: engines that began, by name.
    """
    first, *rest = lines
    engines = first["engines"]
    kept = {name: label for name, label in engines.items() if name not in lost}
    told = [
        {"kind": "lost", "engine": name, "label": engines.get(name, name), "reason": why}
        for name, why in {**missing, **lost}.items()
    ]
    return [{**first, "engines": kept}, *told, *(line for line in rest if line.get("engine") not in lost)]


def tell_lost(missing: Mapping[str, str], lost: Mapping[str, str]) -> None:
    """On stderr, each reason once."""
    for message in dict.fromkeys([*missing.values(), *lost.values()]):
        typer.echo(f"left out: {message}", err=True)


def measure_peers(
    run: Line,
    engines: Sequence[TimedEngine],
    samples: Sequence[EncodedPrompt],
    *,
    max_new_tokens: int,
    repeats: int,
    warmups: int,
    dtype: torch.dtype,
    missing: Mapping[str, str],
    output: Path | None,
    told: Callable[[], Sequence[Line]] = lambda: (),
) -> tuple[Sequence[Line], dict[str, str]]:
    """Measure engines that have started, in turn, and write the record. Returns its lines, and the engines lost on the way.

    run: the record's first line. missing: peers that could not start, and why. told: gives the last lines of the record.
    """
    total = num_runs(len(engines), len(samples), repeats=repeats, warmups=warmups)
    with recording(RecordWriter(output)) as record:
        record.write(run)
        with progress(total) as advance:
            lost = measure(
                engines,
                samples,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                warmups=warmups,
                dtype=dtype,
                record=record,
                advance=advance,
            )
        for line in told():
            record.write(line)
        if missing or lost:
            record.complete(without_lost(record.lines, missing, lost))
    return record.lines, lost
