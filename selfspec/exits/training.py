"""`selfspec train-exit`: texts, hidden states and the fitting of exit adapters, in one resumable run.

In several processes with `accelerate launch` or `torchrun` in front, the first computes the states and all fit, each on a
part of every batch. docs/training.md explains the options.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from layerskip_models import LayerSkipModel
from layerskip_models.checkpoints.fingerprint import fingerprint, same_weights
from layerskip_models.exits.adapter import STEERED, ExitAdapters
from layerskip_models.exits.folder import FOLDER, config_for, save_adapters
from layerskip_models.output_paths import output_folder
from layerskip_models.text_files import write_text
from layerskip_models.training.resumable_run import (
    ResumableRun,
    StepReport,
    claim_output_dir,
    make_accelerator,
    progress_bar,
    quiet_console,
)
from layerskip_models.training.saving import write_folder
from selfspec.cli.arguments import load_generator
from selfspec.cli.option_groups import LoadOptions
from selfspec.exits.card import card, figure_lines
from selfspec.exits.fitting import ExitFigures, ExitFit, measure
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import HiddenStateDataset, StatesPlan, plan_for, states_dtype, write_states
from selfspec.exits.own_answers import own_answers
from selfspec.exits.settings import DATA_FIELDS, ExitTraining
from selfspec.exits.training_texts import TextReader, TrainingText, prompts_of, texts_of
from selfspec.generator import SelfSpecGenerator
from selfspec.messages import template_of

_PARTS = ("train", "held-out")


def train_exit(config: ExitTraining, console: Console | None = None) -> Path:
    """Run to the end, from where an earlier call was interrupted; return the folder of the finished adapters.

    output_dir receives config.json, states/, log.jsonl, checkpoints/ and, at the end, exits/: the adapters, their card and
    their figures on held-out text. A resumed run is the uninterrupted one. Raises ValueError for data that is missing, an
    output_dir of another run, or layers that the model does not have.
    """
    console = console or quiet_console()
    spread = config.device_map is not None
    if spread and int(os.environ.get("WORLD_SIZE", "1")) > 1:  # before the processes connect: all of them say it
        raise ValueError(
            "device_map spreads the model over the GPUs from one process: start this without accelerate launch or torchrun"
        )
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():
        output_dir = claim_output_dir(config)
        if config.beside:
            output_folder(config.checkpoint_folder() / FOLDER)
        # Without adapters of an earlier run in its folder: the bare exits are improved.
        device = str(accelerator.device) if config.device == "auto" and not spread else config.device
        generator = load_generator(
            config.model,
            LoadOptions(dtype=config.dtype, device=device, exits="none"),
            console,
            several_processes=True,
            device_map="auto" if spread else None,
        )
        model = generator.model
        described = config_for(
            model, exit_layers=config.layers(model), rank=config.width(model), form=config.form,
            steering_size=config.steering_size, base_model=config.model_name(),
        )  # fmt: skip
        dtype = states_dtype(model) if config.states_dtype == "auto" else getattr(torch, config.states_dtype)
        needed = plan_for(described.exit_layers, model, dtype, described.steering_layers)
        plan = _recorded_plan(config, model, needed)
        if accelerator.is_main_process and config.states_of is None:
            _make_states(config, generator, plan, console)
    head = FrozenHead(model, torch.bfloat16 if config.precision == "bf16" else torch.float32)
    stored = model.weights_dtype if model.weights_dtype.itemsize == 2 else None
    del generator, model  # the head is all that fitting needs
    torch.manual_seed(config.seed)
    adapters = ExitAdapters(described).to(head.weight.device)
    train, held_out = (
        HiddenStateDataset(
            config.states_folder / part, plan, needed.depths, length=config.sequence_length, seed=config.seed
        )
        for part in _PARTS
    )
    fit = ExitFit(adapters, train, needed.depths, head, config.fit_settings(len(train)), accelerator)
    run = ResumableRun(config, accelerator, adapters, [fit.optimizer], steps=fit.settings.steps, console=console)
    run.execute(partial(_step, fit))
    if accelerator.is_main_process:
        figures = measure(adapters, held_out, needed.depths, head)
        _write_adapters(config, adapters, figures, stored)
        console.print("\n".join(figure_lines(figures)), soft_wrap=True)
    accelerator.wait_for_everyone()
    return output_dir / FOLDER


def _step(fit: ExitFit, step: int) -> StepReport:
    figures = fit.gradient(step)
    rounded = {
        name: {str(layer): round(value, 5) for layer, value in by_layer.items()}
        for name, by_layer in asdict(figures).items()
    }
    return StepReport(figures=rounded, summary=f"KL {figures.mean_kl:.3f}")


def _recorded_plan(config: ExitTraining, model: LayerSkipModel, needed: StatesPlan) -> StatesPlan:
    """Return the plan that the states in the folder follow, or will follow.

    ValueError unless they are of this model and hold what is needed, or if those of another run are not complete.
    """
    folder = config.states_folder
    path = folder / "states.json"
    if config.states_of is not None:
        if not all(file.exists() for file in (path, *(folder / part / "done.json" for part in _PARTS))):
            raise ValueError(f"{folder} holds no complete states: let the run that states_of names make them first")
    elif not path.exists():
        described = {
            "fingerprint": fingerprint(model),
            "depths": needed.depths,
            "dtype": str(needed.dtype).removeprefix("torch."),
            "rows_before": needed.rows_before,
            "data": {name: getattr(config, name) for name in DATA_FIELDS},
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(described, indent=1) + "\n")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    if not same_weights(recorded["fingerprint"], fingerprint(model)):
        raise ValueError(f"{folder} holds states of another model: choose another output_dir, or delete it")
    missing = sorted({*needed.depths} - {*recorded["depths"]})
    if missing:
        raise ValueError(
            f"{folder} holds no states after layers {', '.join(map(str, missing))}: name them in the run that makes them"
        )
    kept = recorded.get("rows_before", 0)  # earlier versions kept none
    if kept < needed.rows_before:
        raise ValueError(
            f"{folder} holds no rows before those with a loss, which steer: let a run with form {STEERED} make the states"
        )
    return StatesPlan(depths=tuple(recorded["depths"]), dtype=getattr(torch, recorded["dtype"]), rows_before=kept)


def _make_states(config: ExitTraining, generator: SelfSpecGenerator, plan: StatesPlan, console: Console) -> None:
    folder, model = config.states_folder, generator.model
    per_row = plan.bytes_per_row(model.hidden_size)
    budget = config.disk_gb * 1e9
    console.print(
        f"hidden states: {per_row / 1e3:.1f} KB a row; {config.disk_gb:g} GB hold {budget / per_row:,.0f} rows"
    )
    for part, most in (("held-out", config.held_out_tokens), ("train", config.max_tokens)):
        with progress_bar(console, most) as show:
            done = (folder / part / "done.json").exists()  # then the data need not be read again
            texts = iter(()) if done else training_texts(config, generator, held_out=part == "held-out", show=show)
            result = write_states(
                model,
                texts,
                plan,
                folder / part,
                max_tokens=most,
                max_bytes=budget,
                advance=partial(show, f"hidden states, {part}"),
            )
        budget -= result["bytes"]
        why_ended = {
            "data": "all of the data",
            "tokens": "enough tokens",
            "budget": f"stopped at the disk budget of {config.disk_gb:g} GB",
        }[result["ended"]]
        console.print(
            f"{part}: {result['tokens']:,} tokens of {result['texts']:,} texts, {result['bytes'] / 1e6:,.0f} MB; {why_ended}"
        )
        if result["tokens"] == 0:
            raise ValueError(
                f"nothing was kept of the {part} data: raise disk_gb"
                if result["ended"] == "budget"
                else f"the {part} data has no answers to learn from: give more, or use --own-answers"
            )


def training_texts(
    config: ExitTraining, generator: SelfSpecGenerator, *, held_out: bool, show: Callable[[str, int], None]
) -> Iterator[TrainingText]:
    """Texts in the order in which they are used, each source giving its share of the tokens.

    show: called with what is being done, and how many tokens of it are done, while the model writes answers.
    """
    assert generator.tokenizer is not None
    reader = TextReader(
        tokenizer=generator.tokenizer,
        template=template_of(config.model, config.chat_template),
        length=min(config.sequence_length, generator.model.max_positions),
    )
    if not config.own_answers:
        return texts_of(config, reader, held_out=held_out)
    most = min(config.prompt_tokens, max(reader.length - config.answer_tokens, 1))
    return own_answers(
        generator,
        prompts_of(config, reader, most, held_out=held_out),
        config.states_folder / f"answers-{_PARTS[held_out]}.jsonl",
        max_tokens=min(config.answer_tokens, reader.length - 1),
        temperature=config.temperature,
        batch_size=config.answer_batch,
        seed=config.seed + (1 << 20) * held_out,
        advance=partial(show, "writing answers"),
    )


def _write_adapters(
    config: ExitTraining, adapters: ExitAdapters, figures: dict[int, ExitFigures], stored: torch.dtype | None
) -> None:
    """Write the finished folder with its card. stored: dtype of the weights, None for float32."""
    target = Path(config.output_dir) / FOLDER

    def write(path: Path) -> None:
        save_adapters(adapters, path, stored)
        measured: dict[str, Any] = {str(layer): asdict(found) for layer, found in figures.items()}
        (path / "figures.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        done = [json.loads((config.states_folder / part / "done.json").read_text()) for part in _PARTS]
        (path / "README.md").write_text(card(config, adapters.config, figure_lines(figures), *done), encoding="utf-8")

    def copy(path: Path) -> None:
        shutil.copytree(target, path, dirs_exist_ok=True)

    write_folder(target, write)
    if config.beside:
        write_folder(config.checkpoint_folder() / FOLDER, copy)
