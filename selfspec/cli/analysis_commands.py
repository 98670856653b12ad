"""`selfspec trace`, `inspect` and `verify`: look into a run, a checkpoint, or the engine itself."""

from __future__ import annotations

from typing import Any

import psutil
import typer

from policies import LayerCost, parse_policy
from selfspec.analysis.comparison import load_warning
from selfspec.analysis.exactness import every_policy, num_steps, verify_engine
from selfspec.analysis.inspection import SAMPLES, inspect_model, inspection_lines
from selfspec.analysis.trace_plot import plot_trace, trace_lines
from selfspec.cli.arguments import load_generator, load_reference, progress_bar
from selfspec.cli.commands import InspectOptions, TraceOptions, VerifyOptions
from selfspec.cli.console import LogConsole
from selfspec.cli.option_groups import DeviceOptions, LoadOptions
from selfspec.engine.results import sources_text
from selfspec.messages import encode_question
from selfspec.pacer.inference import has_preverifier


def show_trace(text: str, load: LoadOptions, trace: TraceOptions, log: LogConsole) -> None:
    """Decode a prompt, print its rounds, and draw them."""
    generator = load_generator(trace.model, load, log)
    prompt, output = encode_question(text, generator.tokenizer, raw=trace.raw), trace.output
    stops: list[int] | None = [] if isinstance(prompt, str) else None  # a model's answer has an end
    with log.status("Decoding ..."):
        greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": stops, "trace": True}
        result = generator.generate(prompt, policy=trace.policy, max_new_tokens=trace.max_new_tokens, **greedy)
    records = result.trace or ()
    if output is not None:
        plot_trace(records, generator.model.num_layers, result.policy, output)
    LogConsole(stderr=False).print("\n".join(trace_lines(records)))
    log.print(f"policy {result.policy}; {len(records)} rounds" + (f"; wrote {output}" if output else ""))
    if result.stats.num_copied:
        log.print(f"= is an accepted copy, x one that was not; {sources_text(result.stats)}")


def show_inspection(texts: list[str], load: LoadOptions, inspect: InspectOptions, log: LogConsole) -> None:
    """Measure a checkpoint on the texts, and print what was found."""
    generator = load_generator(inspect.model, load, log, prefix_cache=0)
    most, repeats = inspect.max_new_tokens, inspect.repeats
    with progress_bar(len(texts or SAMPLES) * (2 * repeats + 1) + 1, log) as show:
        inspection = inspect_model(generator, texts or SAMPLES, max_new_tokens=most, repeats=repeats, on_progress=show)
    LogConsole(stderr=False).print("\n".join(inspection_lines(inspection)))
    if warning := load_warning(psutil.getloadavg()[0], cores=psutil.cpu_count() or 1):
        log.print(warning)


def show_checks(texts: list[str], load: DeviceOptions, verify: VerifyOptions, log: LogConsole) -> None:
    """Check the engine with this model, and print every check. Ends with status 1 if one fails."""
    policies, draws = verify.policy or [], verify.draws
    llama, prompts = load_reference(verify.model, texts, load.dtype, load.device, log)
    num_layers = llama.config.num_hidden_layers
    for name in policies:
        if "pacer" not in name:  # which needs the model's own files, checked below
            parse_policy(name, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
    own = ["pacer"] if has_preverifier(llama.config.name_or_path) else []
    total = num_steps(num_layers, len(prompts), draws, len(policies or [*every_policy(num_layers), *own]))
    failed, report = 0, LogConsole(stderr=False)
    with progress_bar(total, log) as on_progress:
        asked: dict[str, Any] = {"max_new_tokens": verify.max_new_tokens, "draws": draws, "policies": policies or None}
        for check in verify_engine(llama, prompts, **asked, besides=own, on_progress=on_progress):
            failed += not check.passed
            report.print(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}")
    if failed:
        report.print(f"NOT verified: {failed} of the checks failed; do not trust this engine with this model here")
        raise typer.Exit(1)
    report.print("verified: here, with this model, the engine gives what the model itself gives")
