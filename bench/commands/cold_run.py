"""`selfspec-bench run --cold`: the first texts of fresh processes, where nothing is calibrated, learned or in a cache yet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from bench.commands.bench_options import RunCommand
from bench.commands.session import ended_by_loss, header, progress, recording, show
from bench.datasets import EncodedPrompt
from bench.engines.own import SelfSpecEngine
from bench.engines.peer_process import Peer, PeerProcess
from bench.measure import in_turn
from bench.models import open_model
from bench.provenance import provenance, public_argument
from bench.record import Line
from selfspec import SelfSpecGenerator

_TEXTS = 3
_TIMEOUT = 3600.0
Sampling = dict[str, Any] | None


def run_cold(options: RunCommand, policies: list[str], samples: Sequence[EncodedPrompt], sampling: Sampling) -> None:
    """Run each policy on the same texts in processes that take turns, first without kept costs, then with another's."""
    prompts = samples[:_TEXTS]
    with ExitStack() as held:
        held.enter_context(ended_by_loss())
        with _started(options, "ar", sampling, Path(held.enter_context(TemporaryDirectory()))) as first:
            where = first.about["provenance"]
        asked = {"policies": policies, "rows": options.rows, **(sampling or {"do_sample": False})}
        named = header("cold", where, options.model, prompts, options.max_new_tokens, options.repeats, **asked)
        record = held.enter_context(recording(options.output, named))
        advance = held.enter_context(progress(options.repeats * 2 * len(policies)))
        for repeat in range(options.repeats):
            folder = Path(held.enter_context(TemporaryDirectory()))
            for cache in ("empty", "filled"):
                for policy in in_turn(policies, repeat):
                    kept, name = folder / str(policies.index(policy)), public_argument(policy)
                    measure = partial(_measure, options, policy, prompts, sampling, kept)
                    if cache == "filled" and not kept.exists() and not record.is_complete:  # it broke off in between
                        measure()
                    record.once("cold", measure, policy=name, cache=cache, repeat=repeat)
                    advance(f"{name}, {cache} cache")
    show(record.lines)


def _measure(
    options: RunCommand, policy: str, prompts: Sequence[EncodedPrompt], sampling: Sampling, kept: Path
) -> Line:
    """Time the texts of one process. kept: its folder for costs, made if it is not there."""
    kept.mkdir(exist_ok=True)
    with _started(options, policy, sampling, kept) as process:
        found = [asdict(process.engines[0].generate(prompt.ids, options.max_new_tokens)) for prompt in prompts]
    return {name: [one[name] for one in found] for name in ("seconds", "processor_seconds", "tokens", "stats")}


def _started(options: RunCommand, policy: str, sampling: Sampling, kept: Path) -> PeerProcess:
    return PeerProcess(policy, partial(_fresh, options, policy, sampling, kept), timeout=_TIMEOUT)


def _fresh(options: RunCommand, policy: str, sampling: Sampling, kept: Path) -> Peer:
    """Load the model in a process that has done nothing else."""
    os.environ["SELFSPEC_CACHE"] = str(kept)
    model = open_model(options.model, options.dtype, options.device, options.rows)
    generator = SelfSpecGenerator(model, runner=cast(Any, options.runner), prefix_cache=0)
    engine = SelfSpecEngine(generator, policy, sampling=sampling, as_found=True)
    return Peer(engines=[engine], about={"provenance": provenance(model.device, model.dtype)})
