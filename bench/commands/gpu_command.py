"""`selfspec-bench gpu`: other commands one after the other, each in a process of its own, in the time that a GPU is there.

One that fails, hangs or loses the device touches no other, and what each has measured is kept. Whether tiny models of all
families give the same texts on a card is shown by its tests (tests/engine/test_on_cuda.py).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from time import monotonic

import typer

from bench.commands.bench_options import GpuCommand
from bench.models import num_layers_of
from layerskip_models.checkpoints.loading import resolve_device
from selfspec.cli.console import one_line_errors
from selfspec.defaults import fixed_policy

_PROGRAM = (sys.executable, "-c", "from bench.commands.bench_app import main; main()")
_ENDING_SECONDS = 20.0
_TOKENS, _REPEATS = 128, 4


def gpu(options: GpuCommand) -> None:
    with one_line_errors():
        on_gpu = resolve_device(options.device).type == "cuda"
        shapes = (options.shapes or ("llama3.2-1B,llama3-8B,llama2-7B" if on_gpu else "small")).split(",")
        steps = planned(shapes)
    end, failed = monotonic() + 60 * options.minutes, False
    for name, arguments in steps.items():
        kept = [] if options.output is None else ["--output", str(options.output / f"{name}.jsonl")]
        typer.echo(f"{name}:")
        if reason := fault_of([*arguments, "--device", options.device, *kept], end - monotonic()):
            typer.echo(f"{name}: {reason}", err=True)
            failed = True
    if failed:
        raise typer.Exit(1)


def planned(shapes: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the arguments of each command by its record's name. Raises ValueError for an unknown shape."""
    repeats = ["--repeats", str(_REPEATS)]
    lengths = ["--num-samples", "1", "--prompt-tokens", str(_TOKENS), "--max-new-tokens", str(_TOKENS)]
    first = ["--model", f"synthetic:{shapes[0]}", *lengths]
    steps = {"transformers": ["peers", *first, *repeats]}
    for shape in shapes:
        model = f"synthetic:{shape}"
        fixed = fixed_policy(model, num_layers_of(model))
        chosen = ["--model", model, "--policy", "ar", "--policy", fixed, "--policy", "auto", *repeats]
        steps[f"run-{shape}"] = ["run", *chosen, *lengths, "--task", "english"]
        steps[f"batch-{shape}"] = ["batch", *chosen, "--texts", "1,8,32", "--engine", "none"]
    steps["eager"] = ["run", *first, *repeats, "--task", "english", "--policy", "ar", "--runner", "eager"]
    steps["first-texts"] = ["run", *first, "--repeats", "1", "--task", "english", "--cold"]
    return steps


def fault_of(arguments: Sequence[str], seconds: float) -> str | None:
    """Run a command of `selfspec-bench`, for this long at most. Returns why it did not come to a good end."""
    if seconds <= 0:
        return "no time was left"
    with subprocess.Popen([*_PROGRAM, *arguments]) as process:
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # it then ends what it started
            try:
                process.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return "its time was over"
    return f"it ended with status {status}" if status else None
