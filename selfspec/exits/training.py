"""`selfspec train-exit`: texts, and the fitting of exit adapters to a frozen model, in one resumable run.

In several processes with `accelerate launch` or `torchrun` in front, each takes a part of every batch. docs/training.md
explains the options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from rich.console import Console

from layerskip_models.exits import FOLDER
from layerskip_models.exits.adapter import FARTHEST, AdapterConfig, ExitAdapters
from layerskip_models.exits.folder import config_for, save_adapters
from layerskip_models.training.documents import block_order
from layerskip_models.training.loop import (
    Batch,
    Report,
    fit,
    make_accelerator,
    my_share,
    progress_bar,
    quiet_console,
)
from layerskip_models.training.run_folder import claim_output_dir, write_folder
from selfspec.cli.arguments import load_generator
from selfspec.cli.option_groups import LoadOptions
from selfspec.exits.frozen_model import ExitRows, FrozenHead, exit_rows
from selfspec.exits.loss import WINDOW, ExitAdapterLoss, ExitQuality, measure, set_scales
from selfspec.exits.settings import ExitTraining, default_rank
from selfspec.exits.training_texts import TextReader, TrainingText, own_answers, prompts_of, texts_of
from selfspec.generator import SelfSpecGenerator
from selfspec.messages import template_of

Figures = dict[int, tuple[ExitQuality, ExitQuality]]
_SCALE_SEQUENCES = 16  # from whose rows an exit's scale is taken
_KEPT_BYTES = 1 << 30  # of hidden states: what is beyond is computed again in each epoch


def train_exit(config: ExitTraining, console: Console | None = None) -> Path:
    """Run to the end, from where an earlier call was interrupted; return the folder of the finished adapters.

    output_dir receives config.json, the model's answers if it writes them, log.jsonl, checkpoints/ and, at the end, exits/:
    the adapters, their card and their figures on held-out text. A resumed run is the uninterrupted one. Raises ValueError for
    data that is missing, an output_dir of another run, or layers that the model does not have.
    """
    console = console or quiet_console()
    spread = config.device_map is not None
    if spread and int(os.environ.get("WORLD_SIZE", "1")) > 1:  # before the processes connect: all of them say it
        raise ValueError(
            "device_map spreads the model over the GPUs from one process: start this without accelerate launch or torchrun"
        )
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():  # which writes the answers that the others read
        output_dir = claim_output_dir(config)
        # Without adapters of an earlier run in its folder: the bare exits are improved.
        device = str(accelerator.device) if config.device == "auto" and not spread else config.device
        generator = load_generator(
            config.model,
            LoadOptions(dtype=config.dtype, device=device, exits="none"),
            console,
            several_processes=True,
            device_map="auto" if spread else None,
        )
        layers = config.layers(generator.model)
        train, held_out = (_sequences(config, generator, console, held_out=part) for part in (False, True))
    training = _ExitFit(config, accelerator, generator, layers, train)
    fit(
        config,
        accelerator,
        training.loss,
        [torch.optim.AdamW(training.adapters.parameters(), betas=(0.9, 0.99), weight_decay=config.weight_decay)],
        training.batches,
        training.report,
        steps=config.num_steps(len(train), training.batch),
        console=console,
    )
    if accelerator.is_main_process:
        figures = measure(training.loss, (exit_rows(training.model, texts, training.loss.depths) for texts in held_out))
        stored = training.model.weights_dtype
        _write_adapters(config, training.adapters, figures, stored if stored.itemsize == 2 else None)
        console.print("\n".join(figure_lines(figures)), soft_wrap=True)
    accelerator.wait_for_everyone()
    return output_dir / FOLDER


class _ExitFit:
    """What is fitted, its batches, and what is reported of them. sequences: the texts of each."""

    def __init__(
        self,
        config: ExitTraining,
        accelerator: Accelerator,
        generator: SelfSpecGenerator,
        layers: Sequence[int],
        sequences: Sequence[Sequence[TrainingText]],
    ) -> None:
        self.config, self.accelerator, self.model, self.sequences = config, accelerator, generator.model, sequences
        self.batch = min(max(config.batch_tokens // config.sequence_length, 1), len(sequences))
        described = config_for(
            self.model,
            exit_layers=tuple(layers),
            rank=config.rank or default_rank(self.model),
            form=config.form,
            steering_size=config.steering_size,
            base_model=config.model_name(),
        )
        torch.manual_seed(config.seed)
        self.adapters = ExitAdapters(described).to(self.model.device)
        depths = sorted({*layers, *described.steering_layers, self.model.num_layers})
        self.loss = ExitAdapterLoss(
            self.adapters,
            FrozenHead(self.model),
            depths,
            kl_weight=config.kl_weight,
            ce_weight=config.ce_weight,
            d_pace=config.d_pace,
        )
        self._kept: dict[int, ExitRows] = {}
        self._room = _KEPT_BYTES
        set_scales(self.loss, map(self._rows, range(min(_SCALE_SEQUENCES, len(sequences)))))

    def _rows(self, index: int) -> ExitRows:
        """Run a sequence through the frozen model, once if its states can be kept."""
        if index in self._kept:
            return self._kept[index]
        rows = exit_rows(self.model, self.sequences[index], self.loss.depths)
        if rows.states.nbytes <= self._room:
            self._kept[index] = rows
            self._room -= rows.states.nbytes
        return rows

    def batches(self, step: int) -> list[Batch]:
        """Take this process's sequences of a step, each with its share of the scored rows."""
        order = block_order(step, self.batch, len(self.sequences), self.config.seed)
        total = sum(text.num_scored for index in order for text in self.sequences[index])
        parts: list[Batch] = []
        for place in my_share(self.accelerator, range(self.batch)):
            rows = self._rows(order[place])
            # A row is steered by a row at a random distance.
            draw = np.random.default_rng([self.config.seed, step, place])
            distance = torch.from_numpy(draw.integers(1, FARTHEST + 1, len(rows.scored)))
            parts.append((len(rows.scored) / total, (rows, distance.to(rows.scored.device))))
        return parts

    def report(self, step: int, figures: list[float]) -> Report:
        """Report the means over the scored rows of a step, by exit."""
        by_name = {
            name: {str(layer): round(float(value), 5) for layer, value in zip(self.loss.layers, values)}
            for name, values in zip(("ce", "kl", "agreement"), np.reshape(figures, (3, -1)))
        }
        return Report(figures=by_name, summary=f"KL {np.mean([*by_name['kl'].values()]):.3f}")


def _sequences(
    config: ExitTraining, generator: SelfSpecGenerator, console: Console, *, held_out: bool
) -> list[list[TrainingText]]:
    """Read the texts of one part of the data, until there are enough tokens, and pack them in a random order."""
    part, most = ("held-out", config.held_out_tokens) if held_out else ("train", config.max_tokens)
    texts: list[TrainingText] = []
    tokens = 0
    with progress_bar(console, most) as show:
        for text in _training_texts(config, generator, part, partial(show, f"reading texts, {part}")):
            if text.num_scored > 0:
                texts.append(text)
                tokens += text.num_scored
                if most and tokens >= most:
                    break
    if not texts:
        raise ValueError(f"the {part} data has no answers to learn from: give more, or use --own-answers")
    console.print(f"{part}: {tokens:,} tokens of {len(texts):,} texts")
    sequences: list[list[TrainingText]] = []
    room = 0
    for index in np.random.default_rng(config.seed).permutation(len(texts)).tolist():
        size = len(texts[index].tokens)
        if size > room:
            sequences.append([])
            room = config.sequence_length
        sequences[-1].append(texts[index])
        room -= size
    return sequences


def _training_texts(
    config: ExitTraining, generator: SelfSpecGenerator, part: str, advance: Any
) -> Iterator[TrainingText]:
    """Texts in the order in which they are used, each source giving its share of the tokens.

    advance: called with how many tokens of its answers the model has written.
    """
    assert generator.tokenizer is not None
    held_out = part == "held-out"
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
        Path(config.output_dir) / f"answers-{part}.jsonl",
        max_tokens=min(config.answer_tokens, reader.length - 1),
        temperature=config.temperature,
        batch_size=config.answer_batch,
        seed=config.seed + (1 << 20) * held_out,
        advance=advance,
    )


def figure_lines(figures: Figures) -> list[str]:
    """Held-out figures as a Markdown table."""
    lines = [
        "| exit layer | agreement, bare | with adapter | accepted at temperature 1, bare | with adapter |"
        f" accepted of {WINDOW} drafts, bare | with adapter |",
        "| --: | --: | --: | --: | --: | --: | --: |",
    ]
    for layer, found in figures.items():
        numbers = [(one.agreement, one.overlap, one.run) for one in found]
        cells = [f"{number:.3f}" for pair in zip(*numbers) for number in pair]
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    return lines


def _write_adapters(config: ExitTraining, adapters: ExitAdapters, figures: Figures, dtype: torch.dtype | None) -> None:
    """Write the finished folder with its card. dtype: of the weights, None for float32."""

    def write(path: Path) -> None:
        save_adapters(adapters, path, dtype)
        measured = {layer: dict(zip(("bare", "adapted"), map(asdict, found))) for layer, found in figures.items()}
        (path / "figures.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        (path / "README.md").write_text(_card(config, adapters.config, figure_lines(figures)), encoding="utf-8")

    write_folder(Path(config.output_dir) / FOLDER, write)


def _card(config: ExitTraining, adapters: AdapterConfig, lines: Sequence[str]) -> str:
    """Write the text of README.md. Of paths only the last part: the rest means nothing on another machine."""
    options = ""
    for item in fields(config):
        if (value := getattr(config, item.name)) != item.default:
            values = value if isinstance(value, tuple) else (value,)
            shown = [Path(one).name if isinstance(one, str) else str(one) for one in values]
            options += f"    {item.name}: {', '.join(shown)}\n"
    layers, table = ", ".join(map(str, adapters.exit_layers)), "\n".join(lines)
    return f"""# Exit adapters for {adapters.base_model}

Form {adapters.form}, rank {adapters.rank}, for exits after layers {layers}. They change what early exits draft, and nothing
that verification sees: the model's output stays what it is. Made by `selfspec train-exit` with these options, all others at
their defaults:

{options}
On held-out text, the exits alone and with their adapters. Agreement: the likeliest token is the model's. Accepted at
temperature 1: the chance that a drawn token is. Accepted drafts: how many of {WINDOW} are accepted on average, greedily,
along the text.

{table}
"""
