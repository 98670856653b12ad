"""`selfspec generate --prompts FILE --data-parallel`: prompts shared among processes, each of which holds the whole model.

Each process writes its results at once to its own part file next to the output. At the end rank 0 puts all parts together
in the order of the prompts. If a process is lost, the parts stay, and the same command resumes from them, with any number of
processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from layerskip_models.parallel.ranks import Ranks
from layerskip_models.text_files import read_lines, write_text
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import CopyStore
from selfspec.cli.batch_file import PromptLine, complete_results, generate_file


def generate_shared(
    generator: SelfSpecGenerator,
    prompts: list[PromptLine],
    output: Path,
    *,
    batch_size: int,
    notes: Console,
    store: CopyStore | None = None,
) -> int:
    """Decode this process's share of the prompts; arguments as for `generate_file`. Returns how many failed in all processes.

    The processes need no shared files: results that one finds next to its own output count for all. Raises RankError if
    another process ends too early, ValueError for results of other prompts or options.
    """
    ranks = Ranks.join(torch.device("cpu"))
    found = {key: line for path in (output, *_parts(output)) for key, line in complete_results(path, prompts).items()}
    done = {one for others in ranks.collect([*found]) for one in others}
    left = [line.id for line in prompts if line.id not in done]
    own = _part(output, ranks.rank)
    mine = left[ranks.rank :: ranks.size]
    failed = generate_file(generator, prompts, own, batch_size=batch_size, notes=notes, store=store, only=mine)
    written = {json.loads(line)["id"]: line for line in read_lines(own)}
    parts = ranks.collect((failed, {**found, **written}))
    if ranks.rank == 0:
        together = {key: line for _, lines in parts for key, line in lines.items()}
        write_text(output, "".join(f"{together[line.id]}\n" for line in prompts if line.id in together))
    ranks.collect(None)  # no part is deleted before all are in the output
    for part in _parts(output):
        part.unlink(missing_ok=True)
    return sum(count for count, _ in parts)


def _part(output: Path, rank: int) -> Path:
    return output.with_name(f"{output.name}.part-{rank}")


def _parts(output: Path) -> list[Path]:
    return sorted(output.parent.glob(f"{output.name}.part-*"))
