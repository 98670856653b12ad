"""The loop that all trainings share: steps, checkpoints, log and progress. It goes on after an interruption where it was.

A training is a module whose `forward` gives the loss of a batch. What a step draws (data order, dropout) must be a function
of the seed and the step. Then a resumed run is the uninterrupted one: bit for bit with the same number of processes, and to
rounding with another.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from layerskip_models.training.run_folder import PREFIX, latest_checkpoint, rewind_log, write_folder
from layerskip_models.training.settings import FrozenModelSettings, RunSettings

Batch = tuple[float, tuple[Any, ...]]
"""A share of a step's loss, and the arguments of the module that give the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a step or of an evaluation. figures: for the log. summary: a few words, such as "loss 2.345"."""

    figures: dict[str, Any]
    summary: str


def quiet_console() -> Console:
    """Return a console on standard error, without colours of our own, for what a training says on the way."""
    return Console(stderr=True, highlight=False, markup=False)


def make_accelerator(settings: RunSettings) -> Accelerator:
    """On the GPU, if there is one that the settings allow. Where data are made first, the processes wait for days."""
    frozen = isinstance(settings, FrozenModelSettings)
    return Accelerator(
        mixed_precision="bf16" if settings.precision == "bf16" else "no",
        cpu=not torch.cuda.is_available() or getattr(settings, "device", None) == "cpu",
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(days=7)) if frozen else InitProcessGroupKwargs(),
            DistributedDataParallelKwargs(find_unused_parameters=True),  # a step may leave out exits or whole layers
        ],
    )


@contextmanager
def progress_bar(console: Console, total: int, *, shown: bool = True) -> Iterator[Callable[[str, int], None]]:
    """Show the time left in a bar, on terminals only; yield show(what is being done, how much of the total is done)."""
    count, times = TextColumn("{task.completed:,.0f}"), (TimeElapsedColumn(), TimeRemainingColumn())
    columns, hidden = (
        (TextColumn("{task.description}"), BarColumn(), count, *times),
        not (shown and console.is_terminal),
    )
    with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("starting", total=total or None)
        yield lambda label, done: bar.update(task, completed=done, description=label)


def my_share(accelerator: Accelerator, items: Sequence[Any]) -> Sequence[Any]:
    """Return this process's part of a batch. ValueError if there are fewer items than processes."""
    if len(items) < accelerator.num_processes:
        raise ValueError(f"{len(items)} parts of a step for {accelerator.num_processes} processes: make batches larger")
    return items[accelerator.process_index :: accelerator.num_processes]


def fit(
    settings: RunSettings,
    accelerator: Accelerator,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Callable[[int], Sequence[Batch]],
    report: Callable[[int, list[float]], Report],
    *,
    steps: int,
    console: Console,
    evaluate: Callable[[int], Report | None] = lambda done: None,
) -> None:
    """Take the steps that are missing of a run of `steps` steps, and save them in its folder.

    module: on its device. Its forward returns a loss, and figures to be reported, [n]. optimizers: of its parameters.
    batches(step): this process's part of a step, at least one; the shares of all processes sum to 1, as a rule.
    report(step, figures): the sum of the batches' figures by their shares, over all processes, for people and the log.
    evaluate: called with the number of steps done after each; what it returns is logged and printed.
    Raises ValueError if the loss is not a number any more, and for a checkpoint that is not of these settings.
    """
    folder, log = Path(settings.output_dir) / "checkpoints", Path(settings.output_dir) / "log.jsonl"
    is_main = accelerator.is_main_process
    parts = (module, *optimizers)
    wrapped, *prepared = accelerator.prepare(*parts, device_placement=[False] * len(parts))
    first, seconds_before = _resume(settings, accelerator, folder)
    if is_main:
        rewind_log(log, first)
    started = time.monotonic() - seconds_before
    with progress_bar(console, steps, shown=is_main) as show:
        for step in range(first, steps):
            learning_rate = settings.learning_rate_at(step, steps)
            loss, *figures = _gradient(accelerator, wrapped, batches(step)).tolist()
            if not math.isfinite(loss):
                remedy = "start again with a lower learning_rate or precision fp32"
                raise ValueError(f"the loss of step {step + 1} is {loss}: {remedy}")
            accelerator.clip_grad_norm_(wrapped.parameters(), settings.max_grad_norm)
            for optimizer in prepared:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
                optimizer.zero_grad()
            done, seconds = step + 1, time.monotonic() - started
            taken, evaluation = report(step, figures), evaluate(done)
            if is_main:
                show(f"training, {taken.summary}", done)
                if evaluation or done % settings.log_every == 0 or done == steps:
                    found = taken.figures | (evaluation.figures if evaluation else {})
                    line = {"step": done, "seconds": round(seconds, 2), "learning_rate": learning_rate, **found}
                    with log.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(line) + "\n")
                    _print(console, done, steps, seconds, taken, evaluation)
            if done % settings.save_every == 0 or done == steps:
                _save(settings, accelerator, folder, done, seconds)


def _gradient(accelerator: Accelerator, module: nn.Module, parts: Sequence[Batch]) -> Tensor:
    """Compute the gradient of a step, and return its loss and figures, of all processes."""
    total: Tensor | None = None
    for number, (share, arguments) in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else accelerator.no_sync(module):
            loss, figures = module(*arguments)
            accelerator.backward(loss * (share * accelerator.num_processes))  # whose mean the processes take
        found = torch.cat([loss.detach().view(1), figures.detach()]).float() * share
        total = found if total is None else total + found
    for parameter in module.parameters():  # none in a layer that all samples skipped; momentum still moves it
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    reduced: Tensor = accelerator.reduce(total, reduction="sum")
    return reduced


def _print(console: Console, done: int, steps: int, seconds: float, taken: Report, evaluation: Report | None) -> None:
    """Print a line for each line of the log; where a terminal shows the bar, for evaluations only."""
    if evaluation is None and console.is_terminal:
        return
    minutes = seconds / done * (steps - done) / 60
    console.print(f"step {done}/{steps}  {taken.summary}  about {minutes:.1f} min left")
    if evaluation is not None:
        console.print(f"  {evaluation.summary}", soft_wrap=True)


def _save(settings: RunSettings, accelerator: Accelerator, folder: Path, done: int, seconds: float) -> None:
    state = {"seconds": seconds, "settings": settings.fingerprint()}

    def write(path: Path) -> None:
        accelerator.save_state(str(path), safe_serialization=False)
        (path / "run.json").write_text(json.dumps(state), encoding="utf-8")

    if accelerator.is_main_process:
        write_folder(folder / f"{PREFIX}{done:08d}", write)
        for old in sorted(folder.glob(f"{PREFIX}*"))[:-1]:
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def _resume(settings: RunSettings, accelerator: Accelerator, folder: Path) -> tuple[int, float]:
    """Load the newest checkpoint, if there is one; its number of steps, and the seconds that they took."""
    if (latest := latest_checkpoint(folder)) is None:
        return 0, 0.0
    path, step = latest
    recorded = path / "run.json"
    state = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else {}
    if state.get("settings") != settings.fingerprint():
        remedy = f"choose another output_dir, or delete {folder} to start over"
        raise ValueError(f"{path} was written by an earlier version or with other options: {remedy}")
    accelerator.load_state(str(path))
    return step, float(state["seconds"])
