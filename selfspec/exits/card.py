"""The card of finished exit adapters: their form, their training and their figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from layerskip_models.exits.adapter import STEERED, AdapterConfig
from layerskip_models.exits.steering import FARTHEST
from selfspec.exits.fitting import WINDOW, ExitFigures
from selfspec.exits.settings import ExitTraining

_PATHS = ("model", "output_dir", "states_of")


def figure_lines(figures: Mapping[int, ExitFigures]) -> list[str]:
    """Held-out figures as a Markdown table."""
    lines = [
        "| exit layer | agreement, bare | with adapter | accepted at temperature 1, bare | with adapter |"
        f" accepted of {WINDOW} drafts, bare | with adapter |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]
    for layer, found in figures.items():
        one, other = found.bare, found.adapted
        lines.append(
            f"| {layer} | {one.agreement:.3f} | {other.agreement:.3f} | {one.overlap:.3f} | {other.overlap:.3f} |"
            f" {one.run:.2f} | {other.run:.2f} |"
        )
    return lines


def card(
    config: ExitTraining,
    adapters: AdapterConfig,
    lines: list[str],
    train: Mapping[str, Any],
    held_out: Mapping[str, Any],
) -> str:
    """Write the text of README.md. lines: of the figures. train, held_out: as returned by `write_states`."""
    command = " \\\n      ".join(
        ["selfspec train-exit" + (f" {_named(config.model)}" if config.model else ""), *_options(config)]
    )
    layers = ", ".join(map(str, adapters.exit_layers))
    about, steering = f"Form {adapters.form}, rank {adapters.rank}", ""
    if adapters.form == STEERED:
        depths = ", ".join(map(str, adapters.steering_layers))
        about += f", steered by the last verified row's states after layers {depths} (width {adapters.steering_size})"
        steering = f" The row that steers is 1 to {FARTHEST} positions before, in turn."
    whose = "answers that the model wrote itself" if config.own_answers else "the data's own text"
    table = "\n".join(lines)
    return f"""# Exit adapters for {adapters.base_model}

{about}, for exits after layers {layers}. They change what early exits draft, and nothing \
that verification sees: the model's output stays what it is.

Trained on {train["tokens"]:,} tokens of {whose} ({train["texts"]:,} texts):

    {command}

On {held_out["tokens"]:,} held-out tokens, the exits alone and with their adapters. Agreement: the likeliest token is the \
model's. Accepted at temperature 1: the chance that a drawn token is. Accepted drafts: how many of {WINDOW} are accepted on \
average, greedily, along the text.{steering}

{table}
"""


def _options(config: ExitTraining) -> list[str]:
    """List the options that differ from their defaults, as on a command line."""
    words = []
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name == "model" or value == item.default:
            continue
        flag = "--" + item.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words.append(f"{flag} {_named(one) if item.name in (*_PATHS, 'data', 'evaluate_on') else one}")
    return words


def _named(value: str) -> str:
    """Keep the last part of a path, with its share: the rest of it means nothing on another machine."""
    return Path(value).name if Path(value.rpartition(":")[0] or value).exists() else value
