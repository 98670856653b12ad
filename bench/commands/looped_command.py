"""`selfspec-bench looped`: a looped model decoded plainly, in rounds and along the diagonal, at imposed agreement.

Nobody needs a trained model for the time that these take, only to know how often drafts are right. So which drafts are right
is set here, by position: the same ones for every policy. The rows that would choose them are run all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from bench.commands.bench_options import LoopedCommand
from bench.commands.context_command import long_prompt
from bench.commands.session import header, loaded, progress, recording, show
from bench.commands.sweep_command import parse_range
from bench.engines.own import GREEDY
from bench.machine import WeightBytes, measure_bandwidth
from bench.measure import in_turn
from bench.models import open_tokenizer
from bench.provenance import provenance
from bench.record import Line
from bench.report.looped_tables import DIAGONAL
from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from selfspec.cli.console import one_line_errors
from selfspec.engine import wave
from selfspec.engine.draft import Draft

_SWEEPS = 5


def looped(options: LoopedCommand) -> None:
    with one_line_errors():
        contexts, agreements = parse_range(options.contexts, "--contexts"), parse_shares(options.agreement)
        model = loaded(options).with_kv_dtype(options.kv_dtype)
        if model.num_loops < 2:
            raise ValueError("only a looped model can be measured: this one runs its layers once")
        tokenizer = open_tokenizer(options.model)
        prompts, most = [long_prompt(tokenizer, length) for length in contexts], options.max_new_tokens
        where, kept = provenance(model.device, model.dtype), str(model.kv_dtype).removeprefix("torch.")
        more = {"agreements": agreements, "loops": model.num_loops, "weights": options.dtype, "kv_dtype": kept}
        first = header("looped", where, options.model, prompts, most, options.repeats, **more)
    policies = {share: [*fixed_rounds(model, share), DIAGONAL] for share in agreements}
    turns = [("ar", None), *((policy, share) for share in agreements for policy in policies[share])]
    with recording(options.output, first) as record, progress(len(contexts) * len(turns) * options.repeats) as advance:
        for prompt in [] if record.is_complete else prompts:
            key = {"context": len(prompt.ids)}
            for repeat in range(options.repeats):
                record.once(
                    "bandwidth", lambda: {"bytes_per_second": measure_bandwidth(model.device)}, **key, repeat=repeat
                )
                for rows in (1, model.num_loops):
                    record.once(
                        "sweep", partial(time_sweep, model, len(prompt.ids), rows), **key, repeat=repeat, rows=rows
                    )
            decode = partial(
                SelfSpecGenerator(model, prefix_cache=1).generate, prompt.ids, max_new_tokens=most, **GREEDY
            )
            own = decode(policy="ar").new_tokens
            for repeat in range(options.repeats):
                for policy, share in in_turn(turns, repeat):
                    with imposed(scripted(len(prompt.ids), own, share, model.vocab_size)):
                        measure = partial(_decoded, decode, policy, own, model.loop_layers)
                        record.once("decode", measure, **key, repeat=repeat, policy=policy, agreement=share)
                    advance(policy)
    show(record.lines)


def parse_shares(text: str) -> list[float]:
    """Read numbers in [0, 1], separated by commas. ValueError for anything else."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"--agreement must be numbers in [0, 1], as in 0.8,0.9, got {text!r}")
    return shares


def fixed_rounds(model: LayerSkipModel, share: float) -> list[str]:
    """Name the two rounds after the first loop that arithmetic calls best, where reading weights is all that costs."""
    head, draft_head = (
        size / (model.layer_bytes * model.loop_layers) for size in (model.head_bytes, model.draft_head_bytes)
    )

    def speed(drafts: int) -> float:
        return sum(share**place for place in range(drafts + 1)) / (drafts * (1 + draft_head) + model.num_loops + head)

    best = sorted(range(1, 16), key=speed)[-2:]
    return [f"ls:{model.loop_layers}-{drafts}" for drafts in sorted(best)]


def scripted(start: int, own: Sequence[int], share: float | None, vocab_size: int) -> list[int]:
    """Return the draft for each position: the model's own token with the chance `share`, else the next in the vocabulary."""
    random = Random(1)
    drawn = [token if random.random() < (share or 0) else (token + 1) % vocab_size for token in own]
    return [0] * start + drawn + [0] * 32


@contextmanager
def imposed(drafts: Sequence[int]) -> Iterator[None]:
    """Within it, the token that is drafted for position p is drafts[p]."""
    choose = wave._draft

    def picked(self: Draft, *_: Any, **__: Any) -> int:
        return drafts[self.sequence.length + self.first]

    def entered(draft: Draft, said: wave.Said) -> None:
        before = len(draft.flight)
        choose(draft, said)
        if len(draft.flight) > before:
            position = draft.sequence.length + len(draft.block) + before - 1
            draft.flight[-1] = replace(draft.flight[-1], token=drafts[position])

    with patch.object(Draft, "_pick", picked), patch.object(wave, "_draft", entered):
        yield


def _decoded(decode: Any, policy: str, own: Sequence[int], loop_layers: int) -> Line:
    """Decode once more; the prompt's keys and values are those of an earlier run."""
    result = decode(policy=policy)
    stats, equal = result.stats, result.new_tokens == own
    seconds, tokens = stats.seconds - stats.time_to_first_token, stats.num_new_tokens - 1
    return {"seconds": seconds, "tokens": tokens, "passes": stats.loaded_layers / loop_layers, "outputs_equal": equal}


def time_sweep(model: LayerSkipModel, context: int, rows: int) -> Line:
    """Time a pass over one loop's layers with each row in another loop, and the head on the first and the last row."""
    cache, weights = KVCache(model, context + 1), WeightBytes.of(model)
    for memory in cache.memory:
        memory.zero_()
    hidden = torch.randn(rows, model.hidden_size, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    loops, times = [cache.loop(model.num_loops - 1 - row) for row in range(rows)], []
    with torch.inference_mode(), model.on_one_team():
        for _ in range(_SWEEPS):
            cache.declare(context)
            start = perf_counter()
            moved = model.run_layers(hidden, 0, model.loop_layers, [(loop, 1) for loop in loops])
            model.choices(moved[[0, -1]] if rows > 1 else moved).read()
            times.append(perf_counter() - start)
    read = model.loop_layers * (weights.layer + rows * context * weights.kv) + weights.head
    return {"seconds": median(times), "bytes": read}
