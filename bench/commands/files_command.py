"""`selfspec-bench files`: what engines do with GGUF files, on one thread and on several, and what loading takes."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.commands.bench_options import FilesCommand
from bench.commands.context_command import long_prompt
from bench.commands.session import header, progress, recording, show, started, write_engines
from bench.commands.sweep_command import parse_range
from bench.engines.catalogue import Maker, Work, engines_beside, loaders, makers
from bench.engines.gguf_file import rewrite_gguf
from bench.engines.own import EngineLostError, ThreadedEngine, TimedEngine
from bench.engines.peer_process import Peer
from bench.measure import Survivors, in_turn
from bench.models import file_of, open_tokenizer, weights_digest
from bench.record import Record
from selfspec.cli.console import one_line_errors

_TEXT = 64  # tokens of a prompt of several texts
Item = tuple[str, list[Any], int]
"""The name of a measurement, its prompts, and how many tokens follow each."""


def files(options: FilesCommand) -> None:
    with one_line_errors(), TemporaryDirectory() as folder:
        paths = [file for name in options.files if (file := file_of(name)) is not None]
        if len(paths) < len(options.files):
            raise ValueError(f"{', '.join(options.files)} must be GGUF files, which all engines read as they are")
        for kind in options.kind or ():
            rewrite_gguf(paths[0], written := Path(folder) / f"{kind}.gguf", kind)
            paths.append(written)
        lengths = parse_range(options.prompt_tokens, "--prompt-tokens")
        threads = parse_range(options.threads, "--threads")
        tokenizer = open_tokenizer(str(paths[0]))
        prompts = [long_prompt(tokenizer, length) for length in (*lengths, options.texts * _TEXT)]
        *single, long = (prompt.ids for prompt in prompts)
        # The shortest prompt is followed by all new tokens: decoding is timed after it.
        new = [options.max_new_tokens, *[2] * (len(single) - 1)]
        work: list[Item] = [(f"prompt {len(ids)}", [ids], most) for ids, most in zip(single, new)]
        work.append((f"{options.texts} texts", [*long.split(_TEXT)], options.max_new_tokens))
        asked, most = engines_beside(options.engine, paths[0]), max(lengths) + options.max_new_tokens
        alike = partial(Work, dtype="auto", device="cpu", policies=["ar"], max_tokens=most)
        works = {path.stem: alike(checkpoint=str(path), file=path) for path in paths}
        made: dict[str, Maker] = {
            f"{name}:{stem}": partial(_on_threads, make, stem, threads)
            for stem, own in works.items()
            for name, make in makers(asked, own).items()
        }
        digests, measured = {path.stem: weights_digest(str(path)) for path in paths}, [name for name, _, _ in work]
        said = {"files": digests, "engines": asked, "threads": threads, "measured": measured}
        with started(made, options.peer_timeout) as (engines, where, missing):
            first = header("files", where, str(paths[0]), prompts, options.max_new_tokens, options.repeats, **said)
            with recording(options.output, first) as record:
                write_engines(record, engines, missing)
                _measure(record, engines, work, options.repeats)
                sentence = str(tokenizer.decode(single[0]))
                for repeat in range(options.loads):
                    for stem, own in works.items():
                        for name, load in loaders(asked, own, sentence, options.peer_timeout).items():
                            with suppress(EngineLostError):
                                record.once("loading", load, name=name, weights=stem, repeat=repeat)
    show(record.lines)


def _on_threads(make: Maker, file: str, threads: list[int]) -> Peer:
    peer = make()
    engines = [ThreadedEngine(one, file, count) for one in peer.engines for count in threads]
    return Peer(engines=engines, about=peer.about)


def _measure(record: Record, engines: list[TimedEngine], work: list[Item], repeats: int) -> None:
    """Time all work by all engines in turn, after two short texts that warm each of them up."""
    survivors = Survivors(engines[0], record)
    for engine in [] if record.is_complete else engines:
        survivors.call(engine, partial(engine.run, work[-1][1][:2], 4))
    with progress(len(engines) * len(work) * repeats) as advance:
        for repeat in range(repeats):
            for name, prompts, most in work:
                for engine in in_turn(engines, repeat):
                    advance(f"{engine.label}, {name}")
                    key = {"engine": engine.name, "what": name, "repeat": repeat}
                    timed = partial(_timed, engine, prompts, most)
                    survivors.call(engine, partial(record.once, "file", timed, **key))


def _timed(engine: TimedEngine, prompts: list[Any], max_new_tokens: int) -> dict[str, Any]:
    """Time one text to its first token and from there on, or several texts together."""
    if len(prompts) > 1:
        run = engine.run(prompts, max_new_tokens)
        return {"decode_tokens": run.decode_tokens, "decode_seconds": run.decode_seconds}
    found = engine.generate(prompts[0], max_new_tokens)
    whole = {"prompt_tokens": len(prompts[0]), "prompt_seconds": found.time_to_first_token}
    return {**whole, "decode_tokens": max_new_tokens - 1, "decode_seconds": found.decode_seconds}
