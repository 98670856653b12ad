"""`python -m bench.experiments ranks`: one model over several processes of a CPU, and one process with as many threads."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from bench.commands.bench_options import (
    DtypeOption,
    ModelOption,
    NewTokensOption,
    NumSamplesOption,
    PromptsOption,
    PromptTokensOption,
    RepeatsOption,
)
from bench.commands.preparation import encoded, is_synthetic, load_network, open_tokenizer, progress
from bench.report.table import Table, print_tables
from layerskip_models import DEMO_PATH, load_model
from layerskip_models.kernels.threads import usable
from layerskip_models.parallel.shard_loading import load_shard
from selfspec import SelfSpecGenerator
from selfspec.cli.notes import one_line_errors

_WARM = 16


@dataclass(frozen=True, slots=True)
class _Run:
    """All prompts once. prefill, decoding, waiting: seconds for them, and of both what went by waiting for other ranks."""

    tokens: list[list[int]]
    prefill: float
    decoding: float
    waiting: float = 0.0


def ranks(
    model: ModelOption = None,
    tensor_parallel: Annotated[int, typer.Option(min=2, help="Processes that the model is divided over.")] = 2,
    policy: Annotated[list[str] | None, typer.Option(help="Policy, repeatable. Default: ar and auto.")] = None,
    prompts: PromptsOption = None,
    num_samples: NumSamplesOption = 2,
    prompt_tokens: PromptTokensOption = 64,
    max_new_tokens: NewTokensOption = 96,
    repeats: RepeatsOption = 5,
    dtype: DtypeOption = "auto",
) -> None:
    """Measure tensor parallelism between processors: the processes share the cores that one process has alone, in turn.

    "waiting" is the part of the time in which the first rank waited for others, or for the messages between them.
    """
    with one_line_errors():
        checkpoint, cores = model or str(DEMO_PATH), usable().cores
        if cores < tensor_parallel:
            raise ValueError(f"{tensor_parallel} processes need a core each, and this one may use {cores}")
        samples = encoded(prompts, num_samples, open_tokenizer(checkpoint), prompt_tokens)
        ids = [sample.ids.tolist() for sample in samples]
        policies = policy or ["ar", "auto"]
        with _folder(checkpoint, dtype) as folder:
            torch.set_num_threads(cores)
            whole = SelfSpecGenerator(load_model(folder, dtype=dtype, device="cpu"), prefix_cache=0)
            with _processes(folder, dtype, tensor_parallel, cores // tensor_parallel) as ends:
                found = _measured(whole, ends, ids, policies, max_new_tokens, repeats)
    print_tables([_table(found, tensor_parallel, cores, max_new_tokens)])


def _measured(
    whole: SelfSpecGenerator,
    ends: Sequence[Connection],
    ids: list[list[int]],
    policies: Sequence[str],
    new: int,
    repeats: int,
) -> dict[str, list[tuple[_Run, _Run]]]:
    """By policy, runs of one process and of several, in turn."""
    found: dict[str, list[tuple[_Run, _Run]]] = {policy: [] for policy in policies}
    for policy in policies:
        _all_prompts(whole, ids[:1], policy, _WARM)
        _asked(ends, ids[:1], policy, _WARM)
    with progress(len(policies) * repeats) as advance:
        for _ in range(repeats):
            for policy in policies:
                found[policy].append((_all_prompts(whole, ids, policy, new), _asked(ends, ids, policy, new)))
                advance(policy)
    return found


def _table(found: dict[str, list[tuple[_Run, _Run]]], ranks: int, cores: int, new: int) -> Table:
    rows = []
    for policy, runs in found.items():
        many = len(runs[0][0].tokens) * (new - 1)
        alone, divided = ([many / run.decoding for run in runs] for runs in zip(*runs))
        ratio = median(b / a for a, b in zip(alone, divided))
        prompt = median(one.prefill / other.prefill for one, other in runs)
        waiting = median(other.waiting / (other.prefill + other.decoding) for _, other in runs)
        same = sum(one.tokens == other.tokens for one, other in runs)
        rows.append(
            (policy, f"{median(alone):.1f}", f"{median(divided):.1f}", f"{ratio:.2f}", f"{prompt:.2f}", f"{waiting:.0%}",
             f"{same} of {len(runs)}")
        )  # fmt: skip
    columns = (
        "policy", "one process, tokens/s", f"{ranks} processes", "ratio", "ratio for prompts", "waiting", "same texts"
    )  # fmt: skip
    title = f"One model over {ranks} processes, {cores // ranks} of {cores} cores each, beside one process (medians)"
    return Table(name="ranks", title=title, columns=columns, rows=tuple(rows))


def _all_prompts(generator: SelfSpecGenerator, ids: list[list[int]], policy: str, new: int) -> _Run:
    results = [
        generator.generate(one, max_new_tokens=new, policy=policy, do_sample=False, eos_token_id=[]) for one in ids
    ]
    prefill = sum(result.stats.time_to_first_token for result in results)
    seconds = sum(result.stats.seconds for result in results)
    return _Run([result.new_tokens for result in results], prefill, seconds - prefill)


def _asked(ends: Sequence[Connection], ids: list[list[int]], policy: str, new: int) -> _Run:
    """The same of all ranks; what the first one says."""
    for end in ends:
        end.send((ids, policy, new))
    told: list[Any] = [end.recv() for end in ends]
    for one in told:
        if isinstance(one, Exception):
            raise one
    first = told[0]
    assert isinstance(first, _Run)
    return first


@contextmanager
def _folder(checkpoint: str, dtype: str) -> Iterator[str]:
    """Where the ranks can read their parts; weights that are drawn are saved there for as long as it lasts."""
    if not is_synthetic(checkpoint):
        yield checkpoint
        return
    with TemporaryDirectory() as folder:
        load_network(checkpoint, "auto" if dtype == "int8" else dtype, "cpu").save_pretrained(folder)
        yield folder


@contextmanager
def _processes(folder: str, dtype: str, ranks: int, threads: int) -> Iterator[list[Connection]]:
    """One end of a pipe to each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    started, ends = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, rank, ranks, port, folder, dtype, threads), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        ends.append(ours)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
        for process in started:
            process.join(timeout=5)
            process.kill()


def _rank(end: Connection, rank: int, ranks: int, port: int, folder: str, dtype: str, threads: int) -> None:
    """What a rank does: a run whenever it is asked for one, until the other end is closed."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(threads)
    try:
        model = load_shard(Path(folder), dtype=dtype, device="cpu")
        group = model.ranks
        assert group is not None
        generator = SelfSpecGenerator(model, prefix_cache=0)
        while True:
            ids, policy, new = end.recv()
            before = group.waiting_seconds
            run = _all_prompts(generator, ids, policy, new)
            end.send(_Run(run.tokens, run.prefill, run.decoding, group.waiting_seconds - before))
    except EOFError:
        return
    except Exception as error:
        end.send(error)
