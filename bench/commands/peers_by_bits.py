"""`selfspec-bench peers --converted`: engines at 16, 8 and 4 bits, on one text at a time and on several together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.commands.converted_peers import peers_at
from bench.commands.loaded_peers import load_once, loading_line
from bench.commands.preparation import configuration, encoded, open_tokenizer, progress, recording, run_line
from bench.commands.started_peers import start, start_all, without_lost
from bench.datasets import EncodedPrompt
from bench.engines.converted import GGUF_KINDS, WEIGHTS
from bench.engines.own import EngineLostError
from bench.engines.peer_process import PeerProcess
from bench.machine.throughput import BatchEngine, measure_batch
from bench.measure import in_turn, tried
from bench.record import Line, RecordWriter
from bench.sweep import parse_range
from selfspec.analysis.comparison import first_difference

COMMAND = "peers --converted"
"""What a record calls it."""


def measure_by_bits(
    folder: Path,
    *,
    bits: str,
    texts: int,
    prompts: Path | None,
    num_samples: int,
    prompt_tokens: int,
    max_new_tokens: int,
    repeats: int,
    warmups: int,
    loads: int,
    timeout: float,
    output: Path | None,
) -> tuple[Sequence[Line], dict[str, str]]:
    """Measure what `peers_at` names, one number of bits after the other. Returns the record, and the engines left out.

    bits: as in "16,8,4". texts: that are decoded together, all of one length. loads: of each engine, each in a new process.
    Raises ValueError for other bits and for a folder that `convert` did not write.
    """
    chosen = parse_range(bits, "--bits")
    if unknown := sorted(set(chosen) - set(GGUF_KINDS)):
        raise ValueError(f"--bits must be of {', '.join(map(str, GGUF_KINDS))}, got {', '.join(map(str, unknown))}")
    if not (folder / WEIGHTS).is_dir():
        raise ValueError(f"{folder} has no {WEIGHTS}: make it with selfspec-bench convert")
    samples = encoded(prompts, max(num_samples, texts), open_tokenizer(str(folder / WEIGHTS)), prompt_tokens)
    if len(samples) < texts:
        raise ValueError(f"--texts {texts} needs as many prompts, there are {len(samples)}")
    shortest = min(sample.ids.numel() for sample in samples[:texts])
    together = [sample.ids[-shortest:] for sample in samples[:texts]]
    alone = samples[:num_samples]
    longest = max(sample.ids.numel() for sample in samples) + max_new_tokens
    about = {
        **configuration(str(folder / WEIGHTS), samples, max_new_tokens, repeats, warmups),
        "model": folder.resolve().name,
        "texts": [1, texts],
        "prompt_tokens_together": shortest,
    }
    measured = partial(
        _measure_bits, alone=alone, together=together, new=max_new_tokens, repeats=repeats, warmups=warmups
    )
    missing: dict[str, str] = {}
    lost: dict[str, str] = {}
    names: dict[str, str] = {}
    where: dict[str, Any] = {}
    with recording(RecordWriter(output)) as record:
        record.write(run_line(COMMAND, about, [], {}))
        for own_bits in sorted(chosen, reverse=True):
            makers, not_made = peers_at(own_bits, folder, longest)
            earlier = [load_once(name, make, timeout) for _ in range(loads - 1) for name, make in makers.items()]
            with ExitStack() as running:
                (own_name, own), *others = makers.items()
                ours = start(own_name, own, timeout, running)
                started, not_started = start_all(dict(others), timeout, running)
                missing |= {**not_made, **not_started}
                processes = [ours, *started]
                engines = [peer.batches[0] for peer in processes]
                names |= {engine.name: engine.label for engine in engines}
                found = [item for peer in processes for item in peer.about["versions"].items()]
                where |= {name: version for name, version in found if where.get(name) is None}
                lost |= measured(engines, own_bits, write=record.write)
                for line in [*filter(None, earlier), *map(loading_line, _alive(processes, lost))]:
                    record.write({**line, "bits": own_bits})
        first = {**record.lines[0], "engines": names, "provenance": where}
        record.complete(without_lost([first, *record.lines[1:]], missing, lost))
    return record.lines, {**missing, **lost}


def _alive(processes: Sequence[PeerProcess], lost: dict[str, str]) -> list[PeerProcess]:
    return [peer for peer in processes if peer.batches[0].name not in lost]


def _measure_bits(
    engines: Sequence[BatchEngine],
    bits: int,
    *,
    alone: Sequence[EncodedPrompt],
    together: Sequence[Any],
    new: int,
    repeats: int,
    warmups: int,
    write: Callable[[Line], object],
) -> dict[str, str]:
    """All engines in turn, on each prompt alone and on several together. Returns why some were lost on the way, by name."""
    groups = [*([sample.ids] for sample in alone), together]
    lost: dict[str, str] = {}
    expected = [engines[0].run(group, new).tokens for group in groups]
    with progress(len(engines) * (2 * warmups + len(groups) * repeats)) as advance:
        for engine in engines:
            for _ in range(warmups):
                for group in (groups[0], together):
                    tried(engine, engines, lost, partial(_whole, engine, group, new))
                    advance(engine.label)
        for repeat in range(repeats):
            for number, group in enumerate(groups):
                for engine in in_turn(engines, repeat * len(groups) + number):
                    line = tried(engine, engines, lost, partial(_whole, engine, group, new))
                    advance(engine.label)
                    if line is not None:
                        tokens = line.pop("token_ids")
                        shares = [_equal_share(own, theirs) for own, theirs in zip(tokens, expected[number])]
                        share = sum(shares) / len(shares)
                        write({**line, "bits": bits, "group": number, "repeat": repeat, "equal_share": share})
    return lost


def _whole(engine: BatchEngine, group: Sequence[Any], new: int) -> Line:
    """A batch's line with its tokens. Raises EngineLostError for another number of tokens than was asked for."""
    line, run = measure_batch(engine, group, new)
    if any(len(own) != new for own in run.tokens):
        raise EngineLostError(f"{engine.label} returned {sorted(set(map(len, run.tokens)))} tokens, not {new}")
    return {
        **line,
        "prompt_tokens": sum(int(ids.numel()) for ids in group),
        "prompt_seconds": run.prompt_seconds,
        "token_ids": run.tokens,
    }


def _equal_share(tokens: list[int], expected: list[int]) -> float:
    """How much of a text comes before its first difference from plain decoding's of the same bits."""
    position = first_difference(expected, tokens)
    return 1.0 if position is None else position / len(tokens)
