"""One training run in a folder: steps, checkpoints, log and progress bar. It goes on after an interruption where it was.

What a step draws (data order, dropout) must be a function of the seed and the step. Then no random state is saved, and a
resumed run is the uninterrupted one: bit for bit with the same number of processes, and to rounding with another.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from layerskip_models.output_paths import output_folder
from layerskip_models.text_files import write_text
from layerskip_models.training.saving import (
    checkpoint_path,
    drop_old_checkpoints,
    latest_checkpoint,
    rewind_log,
    write_folder,
)
from layerskip_models.training.settings import FrozenModelSettings, RunSettings


def quiet_console() -> Console:
    """Return a console on standard error, without colours of our own, for what a training says on the way."""
    return Console(stderr=True, highlight=False, markup=False)


def make_accelerator(settings: RunSettings) -> Accelerator:
    """On the GPU, if there is one that the settings allow. Where data are made first, the processes wait for days."""
    on_cpu, handlers = not torch.cuda.is_available(), []
    if isinstance(settings, FrozenModelSettings):
        on_cpu = on_cpu or settings.device == "cpu"
        handlers.append(InitProcessGroupKwargs(timeout=timedelta(days=7)))
    return Accelerator(
        mixed_precision="bf16" if settings.precision == "bf16" else "no", cpu=on_cpu, kwargs_handlers=handlers
    )


def claim_output_dir(settings: RunSettings) -> Path:
    """Make output_dir and record the settings in it, or find the same ones there (a run to resume).

    A run with other settings that failed before it had any of `settings.results` is replaced, and what it prepared is
    deleted, since other settings would prepare something else. A setting that is younger than the recorded run had its
    default there. One that exists no more is left to the run's checkpoint, which fits only if it had its default.
    Raises ValueError when the folder holds a run with other settings, or something else.
    """
    output_dir = Path(settings.output_dir)
    recorded_path = output_dir / "config.json"
    mine = json.loads(json.dumps(asdict(settings)))
    if recorded_path.exists():
        defaults = {item.name: item.default for item in fields(settings) if item.default is not MISSING}
        recorded = json.loads(json.dumps(defaults)) | json.loads(recorded_path.read_text(encoding="utf-8"))
        changed = sorted(name for name in mine if name not in settings.operational and mine[name] != recorded.get(name))
        if not changed:
            return output_dir
        if any((output_dir / name).exists() for name in settings.results):
            raise ValueError(
                f"output_dir {settings.output_dir!r} holds a run with another {', '.join(changed)}:"
                " choose another output_dir, or repeat that run's options to resume it"
            )
        for name in settings.preparation:
            _delete(output_dir / name)
    elif output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(f"output_dir {settings.output_dir!r} exists and holds no training run: choose another")
    output_folder(output_dir)
    write_text(recorded_path, json.dumps(mine, indent=1) + "\n")
    return output_dir


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def progress_bar(console: Console, total: int, *, shown: bool = True) -> Iterator[Callable[[str, int], None]]:
    """Show the time left in a bar, on terminals only; yield show(what is being done, how much of the total is done)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=total or None)
        yield lambda label, done: bar.update(task, completed=done, description=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a step or of an evaluation. figures: for the log. summary: a few words, such as "loss 2.345"."""

    figures: dict[str, Any]
    summary: str


class ResumableRun:
    """The steps of a training run, from its newest checkpoint to its last step.

    model: every process holds all of it. optimizers: of its parameters.
    """

    def __init__(
        self,
        settings: RunSettings,
        accelerator: Accelerator,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        steps: int,
        console: Console,
    ) -> None:
        self.settings, self.accelerator, self.model, self.optimizers = settings, accelerator, model, optimizers
        self.steps, self.console = steps, console
        self._folder = Path(settings.output_dir) / "checkpoints"
        self._log = Path(settings.output_dir) / "log.jsonl"

    def execute(
        self,
        gradient: Callable[[int], StepReport],
        evaluate: Callable[[int], StepReport | None] = lambda done: None,
    ) -> None:
        """Take all steps that are left.

        gradient: called with the number of the step; leaves the gradient of its whole batch, summed over the processes,
            in the parameters.
        evaluate: called after every step with the number of steps done; what it returns is logged and printed.
        """
        first, seconds_before = self._resume()
        is_main = self.accelerator.is_main_process
        if is_main:
            rewind_log(self._log, first)
        started = time.monotonic() - seconds_before
        with progress_bar(self.console, self.steps, shown=is_main) as show:
            for step in range(first, self.steps):
                report = self.take_step(step, gradient)
                done = step + 1
                evaluation = evaluate(done)
                seconds = time.monotonic() - started
                if is_main:
                    show(f"training, {report.summary}", done)
                    if evaluation or done % self.settings.log_every == 0 or done == self.steps:
                        self._write_to_log(done, seconds, report, evaluation)
                        self._print(done, seconds, report, evaluation)
                if done % self.settings.save_every == 0 or done == self.steps:
                    self._save(done, seconds)

    def take_step(self, step: int, gradient: Callable[[int], StepReport]) -> StepReport:
        """One step of the optimisers."""
        report = gradient(step)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate_at(step, self.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return report

    def _write_to_log(self, done: int, seconds: float, report: StepReport, evaluation: StepReport | None) -> None:
        line = {
            "step": done,
            "seconds": round(seconds, 2),
            "learning_rate": self.settings.learning_rate_at(done - 1, self.steps),
            **report.figures,
            **(evaluation.figures if evaluation else {}),
        }
        with self._log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _print(self, done: int, seconds: float, report: StepReport, evaluation: StepReport | None) -> None:
        """Print a line for each line of the log; where a terminal shows the bar, for evaluations only."""
        if evaluation is None and self.console.is_terminal:
            return
        minutes = seconds / done * (self.steps - done) / 60
        self.console.print(f"step {done}/{self.steps}  {report.summary}  about {minutes:.1f} min left")
        if evaluation is not None:
            self.console.print(f"  {evaluation.summary}", soft_wrap=True)

    def _save(self, done: int, seconds: float) -> None:
        state = {"seconds": seconds, "settings": self.settings.fingerprint()}

        def write(path: Path) -> None:
            torch.save(self.model.state_dict(), path / "model.pt")
            torch.save([optimizer.state_dict() for optimizer in self.optimizers], path / "optimizers.pt")
            (path / "state.json").write_text(json.dumps(state), encoding="utf-8")

        if self.accelerator.is_main_process:
            write_folder(checkpoint_path(self._folder, done), write)
            drop_old_checkpoints(self._folder)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> tuple[int, float]:
        """Load the newest checkpoint, if there is one; its number of steps, and the seconds that they took.

        Raises ValueError for a checkpoint of other settings, or of a version that did not record them.
        """
        latest = latest_checkpoint(self._folder)
        if latest is None:
            return 0, 0.0
        path, step = latest
        recorded = path / "state.json"
        state = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else {}
        if state.get("settings") != self.settings.fingerprint():
            raise ValueError(
                f"{path} was written by an earlier version or with other options: choose another output_dir, or delete"
                f" {self._folder} to start over"
            )
        # Loaded to the CPU, moved by load_state_dict: a process's device may be "cpu:0", which torch.load does not know.
        self.model.load_state_dict(torch.load(path / "model.pt", map_location="cpu", weights_only=True))
        states = torch.load(path / "optimizers.pt", map_location="cpu", weights_only=True)
        for optimizer, optimizer_state in zip(self.optimizers, states):
            optimizer.load_state_dict(optimizer_state)
        return step, float(state["seconds"])
