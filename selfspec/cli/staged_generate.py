"""`selfspec generate --two-stages`: one prompt by two processes, of which one drafts while the other verifies."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from transformers import StoppingCriteriaList

from layerskip_models import load_tokenizer
from layerskip_models.parallel.ranks import launched_ranks
from selfspec.cli.arguments import check_sampling, loading
from selfspec.cli.display import PROMPT_STYLE, TextWriter, in_seconds
from selfspec.cli.interrupt import InterruptCriteria
from selfspec.parallel.two_stages import OPTIONS, StagedResult, TwoStages
from selfspec.streaming import TextStreamer

TwoStagesOption = Annotated[
    bool,
    typer.Option(
        "--two-stages",
        help="Draft with the first layers in a second process while the others verify; instead of --policy.",
        rich_help_panel="Speculation",
    ),
]
StageDevicesOption = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="With --two-stages: devices that draft and verify (default: the first two GPUs, or the CPU for both).",
        rich_help_panel="Speculation",
    ),
]
_ALSO = {
    "prompt", "file", "model", "dtype", "exits", "kv_dtype", "exit_layer", "two_stages", "stage_devices", *OPTIONS, "seed",
    "ignore_eos", "as_json", "quiet",
}  # fmt: skip
"""Parameters of `selfspec generate` that go with --two-stages."""


def check_beside_two_stages(context: typer.Context) -> None:
    """ValueError for options that were given on the command line and would do nothing, or for a launcher."""
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None and parameter.name not in _ALSO
        and getattr(context.get_parameter_source(parameter.name), "name", "") != "DEFAULT"
    ]  # fmt: skip
    if given:
        hint = "; where the stages run is --stage-devices" if "--device" in given else ""
        raise ValueError(f"{', '.join(given)} does not go with --two-stages: leave it out{hint}")
    if launched_ranks() > 1:
        raise ValueError("--two-stages starts its second process itself: start the command without torchrun")


def run_two_stages(
    model: str | None,
    prompt: str,
    devices: str | None,
    how: dict[str, Any],
    options: dict[str, Any],
    notes: Console,
    *,
    as_json: bool,
) -> None:
    """Print the text as it comes, then a summary; or one JSON object.

    how: arguments of `TwoStages`, exits "none" for bare ones. options: of `generate`'s command line, those that go with it.
    """
    how["exits"] = None if how["exits"] == "none" else how["exits"]
    if devices is not None:
        how["devices"] = tuple(part.strip() for part in devices.split(","))
    sampling = {name: options[name] for name in (*OPTIONS, "seed")}
    with ExitStack() as stack:
        with loading(model, notes) as name:
            tokenizer = load_tokenizer(name, local_files_only=model is None)
            stages = stack.enter_context(TwoStages(name, local_files_only=model is None, cores="auto", **how))
        check_sampling(stages.model.generation_config, sampling)
        writer = TextWriter(Console(highlight=False))

        def on_start() -> None:
            if writer.is_terminal and not as_json and not notes.quiet:
                writer.write(prompt, PROMPT_STYLE)

        def write(text: str) -> None:
            if not as_json:
                writer.write(text)

        with InterruptCriteria() as interrupt:
            result = stages.generate(
                prompt,
                streamer=TextStreamer(tokenizer, write, on_start),
                stopping_criteria=StoppingCriteriaList([interrupt]),
                **sampling,
            )
        write("\n")
    stop_reason = "interrupted" if interrupt.requested else result.stop_reason
    if as_json:
        typer.echo(json.dumps(_as_dict(stages, result, stop_reason), allow_nan=False))
    else:
        notes.print("\n" + "\n".join(_summary(stages, result, stop_reason)))
    if interrupt.requested:
        raise typer.Exit(130)


def _where(stages: TwoStages) -> str:
    adapted = " with its adapter" if stages.plan.adapters else ""
    return f"exit layer {stages.plan.exit_layer}{adapted} on {stages.plan.devices[0]}, the rest on {stages.plan.devices[1]}"


def _summary(stages: TwoStages, result: StagedResult, stop_reason: str) -> list[str]:
    stats = result.stats
    seconds = stats.time_to_first_token + stats.seconds
    lines = [
        f"{stats.num_new_tokens} tokens in {in_seconds(seconds)}, {stats.num_new_tokens / seconds:.1f} tokens/s; "
        f"first token after {in_seconds(stats.time_to_first_token)}; stop reason: {stop_reason}",
        f"two stages, {_where(stages)}: {stats.verifications} verifications, ",
    ]
    if stats.verified:
        lines[-1] += (
            f"acceptance rate {stats.accepted / stats.verified:.3f} ({stats.accepted} of {stats.verified} drafts), "
            f"{stats.thrown_away} drafted ahead for nothing"
        )
    else:
        lines[-1] += "nothing drafted"
    return lines


def _as_dict(stages: TwoStages, result: StagedResult, stop_reason: str) -> dict[str, object]:
    return {
        "model": stages.plan.name,
        "text": result.text,
        "token_ids": result.new_tokens,
        "num_prompt_tokens": result.stats.num_prompt_tokens,
        "stop_reason": stop_reason,
        "exit_layer": stages.plan.exit_layer,
        "adapted": stages.plan.adapters is not None,
        "devices": [str(device) for device in stages.plan.devices],
        "stats": result.stats.as_dict(),
    }
