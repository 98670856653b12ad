"""Train a Llama-family model with the LayerSkip recipe, from scratch or from a checkpoint.

Run as `python -m layerskip_models.training.loop --data PATH --output-dir DIR ...`, in several processes with
`accelerate launch` or `torchrun` in front. docs/training.md explains the options.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from accelerate import Accelerator, init_empty_weights
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from layerskip_models.training import documents as training_data
from layerskip_models.training import saving as checkpoints
from layerskip_models.training.evaluation import exit_sums
from layerskip_models.training.microbatches import MicroBatch, micro_batches
from layerskip_models.training.options import command_for_config
from layerskip_models.training.own_text import own_text
from layerskip_models.training.recipe import (
    IGNORED,
    draw_keep_mask,
    early_exit_backward,
    enabled_exits,
    exit_hidden_states,
    layer_dropout_rates,
    normalised_exit_weights,
    run_layer,
)
from layerskip_models.training.sharding import check_launched, sharded_model
from layerskip_models.training.start import (
    claim_output_dir,
    described_model,
    own_tokenizer,
    token_streams,
    whole_model,
)
from layerskip_models.training.training_config import OWN_TEXT_PROMPT, TrainingConfig
from layerskip_models.training.whole_copies import HeldModel, WholeCopies
from layerskip_models.transfer import sent


def train(config: TrainingConfig) -> Path:
    """Run the training to its end, from the newest checkpoint in output_dir if there is one; return the model's folder.

    output_dir receives config.json, tokenizer/, tokens/, log.jsonl, checkpoints/ and, at the end, model/: a transformers
    checkpoint in export_dtype with its tokenizer. Where nothing else is said, a resumed run is the uninterrupted one.
    Raises ValueError for data that is missing or too short, an output_dir of another run, or an unsupported checkpoint.
    """
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no", cpu=not torch.cuda.is_available()
    )
    if config.shard:
        check_launched()
    output_dir = Path(config.output_dir)
    with accelerator.main_process_first():
        claim_output_dir(config, output_dir)
        tokenizer = own_tokenizer(config, output_dir)
        described = described_model(config, tokenizer)
        streams = token_streams(config, output_dir, tokenizer)
        whole = None if config.shard else whole_model(config, described)
    held: HeldModel
    if whole is None:
        held = sharded_model(config, accelerator, described)
    else:
        held = WholeCopies(accelerator, whole.to(accelerator.device))
    return _Run(config, accelerator, held, tokenizer, streams).execute()


@dataclass(slots=True)
class _Run:
    config: TrainingConfig
    accelerator: Accelerator
    held: HeldModel
    tokenizer: PreTrainedTokenizerBase
    streams: training_data.TokenStreams
    run_layer: Callable[..., Tensor] = run_layer

    @property
    def model(self) -> LlamaForCausalLM:
        return self.held.model

    def execute(self) -> Path:
        config, output_dir = self.config, Path(self.config.output_dir)
        if config.compile:
            self.run_layer = torch.compile(run_layer)
        num_layers = len(self.model.model.layers)
        weights = config.weights(num_layers)
        if config.layer_dropout > 0:
            layer_dropout_rates(num_layers, config.layer_dropout, config.dropout_time, 0, config.max_steps)
        optimizers = self._optimizers()
        first_step, seconds_before = self._resume(optimizers)
        log_path = output_dir / "log.jsonl"
        if self.accelerator.is_main_process:
            checkpoints.rewind_log(log_path, first_step)
        console = Console(stderr=True)
        started = time.monotonic() - seconds_before
        with _progress(console, self.accelerator.is_main_process) as progress:
            task = progress.add_task("training", total=config.max_steps, completed=first_step, loss="")
            for step in range(first_step, config.max_steps):
                losses = self._step(step, weights, optimizers)
                done = step + 1
                record: dict[str, Any] = {
                    "step": done,
                    "seconds": round(time.monotonic() - started, 2),
                    "learning_rate": config.learning_rate_at(step),
                    "loss": {str(layer): round(loss, 4) for layer, loss in losses.items()},
                }
                if done % config.eval_every == 0 or done == config.max_steps:
                    record["held_out"] = self._evaluate()
                if self.accelerator.is_main_process:
                    progress.update(task, completed=done, loss=f"loss {losses[num_layers - 1]:.3f}")
                    if "held_out" in record or done % config.log_every == 0:
                        with log_path.open("a", encoding="utf-8") as stream:
                            stream.write(json.dumps(record) + "\n")
                        _report(console, record, config.max_steps)
                if done % config.save_every == 0 or done == config.max_steps:
                    self._save(done, optimizers, time.monotonic() - started)
        dtype = getattr(torch, config.export_dtype)
        tensors = self.held.whole_tensors(dtype)
        if self.accelerator.is_main_process:
            checkpoints.write_folder(output_dir / "model", partial(self._export, tensors, dtype))
        self.accelerator.wait_for_everyone()
        return output_dir / "model"

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        config = self.config
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            is_matrix = parameter.ndim == 2 and name.startswith("model.layers.")
            (matrices if is_matrix else others).append(parameter)
        plain = {"params": others, "weight_decay": 0.0}
        betas = (0.9, 0.95)
        if config.optimizer == "muon":
            return [
                self.held.muon(matrices, config.learning_rate, config.weight_decay),
                torch.optim.AdamW([plain], lr=config.learning_rate, betas=betas),
            ]
        decayed = {"params": matrices, "weight_decay": config.weight_decay}
        return [torch.optim.AdamW([decayed, plain], lr=config.learning_rate, betas=betas)]

    def _step(self, step: int, weights: list[float], optimizers: list[torch.optim.Optimizer]) -> dict[int, float]:
        """One optimiser step; the mean loss of each enabled exit over the whole batch."""
        config, accelerator = self.config, self.accelerator
        length = config.sequence_length_at(step)
        batch_size = config.batch_tokens // length
        available = training_data.num_blocks(self.streams.train, length)
        order = training_data.block_order(step, batch_size, available, config.seed)
        keep = self._keep_mask(step, batch_size, len(weights))
        exits = enabled_exits(config.curriculum, len(weights), step, config.max_steps, config.rotation)
        shares = normalised_exit_weights(weights, exits)

        totals = {layer: torch.zeros((), device=accelerator.device) for layer in shares}
        for part in self._parts_of(batch_size, max(config.micro_batch_tokens // length, 1)):
            ids = training_data.block(self.streams.train, [order[row] for row in part.rows], length)
            ids = sent(ids, accelerator.device)
            share = part.real / batch_size
            with accelerator.autocast():
                losses = early_exit_backward(
                    self.model,
                    self._states(ids[:, :-1], shares, keep, part),
                    ids[:, 1:] if part.real == len(ids) else _without_loss(ids[:, 1:], part.real),
                    shares,
                    scale=share,
                    chunk_rows=config.loss_chunk_rows,
                    row_weights=config.row_weights(),
                    drafted=ids[:, :-1] != self.tokenizer.eos_token_id,  # behind it another document starts
                )
            for layer, loss in losses.items():
                totals[layer] += loss * share
        if step >= config.max_steps - config.own_text_steps:
            self._own_text_backward(step, shares)
        reduced = self.held.reduce(totals)
        self.held.clip(config.max_grad_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate_at(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return reduced

    def _parts_of(self, num_rows: int, rows_at_once: int) -> list[MicroBatch]:
        state = self.accelerator
        return micro_batches(
            num_rows, rows_at_once, state.process_index, state.num_processes, in_step=self.held.in_step
        )

    def _states(
        self, input_ids: Tensor, exits: Iterable[int], keep: Tensor | None = None, part: MicroBatch | None = None
    ) -> dict[int, Tensor]:
        """Hidden states at the exits; keep: bool [L, batch], of which the part's rows are looked up."""
        kept = wanted = None
        if keep is not None and part is not None:
            kept, wanted = keep[:, part.rows], keep[:, part.together].any(1)
        return self.held.gathered(
            lambda: exit_hidden_states(self.model, input_ids, exits, kept, wanted, self.run_layer)
        )

    def _own_text_backward(self, step: int, shares: dict[int, float]) -> None:
        """Add the gradient of the loss on the model's own continuations of training text."""
        config, accelerator = self.config, self.accelerator
        available = training_data.num_blocks(self.streams.train, OWN_TEXT_PROMPT)
        order = training_data.block_order(step, config.own_text_rows, available, config.seed + 1)
        parts = self._parts_of(
            config.own_text_rows,
            max(config.micro_batch_tokens // (OWN_TEXT_PROMPT + config.own_text_tokens), 1),
        )
        mine = [order[row] for part in parts for row in part.rows]
        blocks = training_data.block(self.streams.train, mine, OWN_TEXT_PROMPT).to(accelerator.device)
        with self._precision_of_weights():
            text = own_text(self.model, blocks[:, :-1], config.own_text_tokens)
        last = max(shares)
        start = 0
        for part in parts:
            rows = slice(start, start + len(part.rows))
            start = rows.stop
            labels = {layer: text.last_labels[rows] if layer == last else text.labels[rows] for layer in shares}
            loops = text.loops[rows]
            if part.real < len(part.rows):
                labels = {layer: _without_loss(found, part.real) for layer, found in labels.items()}
                loops = loops & (torch.arange(len(loops), device=loops.device) < part.real)[:, None]
            with accelerator.autocast():
                early_exit_backward(
                    self.model,
                    self._states(text.input_ids[rows], shares),
                    labels,
                    shares,
                    scale=config.own_text_weight * part.real / config.own_text_rows,
                    chunk_rows=config.loss_chunk_rows,
                    unwanted=loops,
                    row_weights=config.row_weights(),
                    drafted=text.input_ids[rows] != self.tokenizer.eos_token_id,
                )

    def _precision_of_weights(self) -> AbstractContextManager[object]:
        """Divided weights are gathered as autocast would round them, so what is computed without it needs it, too."""
        return self.accelerator.autocast() if self.held.in_step else nullcontext()

    def _keep_mask(self, step: int, batch_size: int, num_layers: int) -> Tensor | None:
        """Drawn for the whole batch from (seed, step) alone: the same however many processes there are."""
        config = self.config
        if config.layer_dropout == 0:
            return None
        rates = layer_dropout_rates(num_layers, config.layer_dropout, config.dropout_time, step, config.max_steps)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        return draw_keep_mask(rates, batch_size, generator)

    def _evaluate(self) -> dict[str, list[float]] | None:
        """Loss and agreement with the last layer for every exit on held-out text; None without such text."""
        length = self.config.sequence_length
        available = training_data.num_blocks(self.streams.held_out, length)
        num_rows = min(available, max(self.config.eval_tokens // length, 1))
        if num_rows == 0:
            return None
        self.model.eval()
        num_layers = len(self.model.model.layers)
        sums = torch.zeros(2, num_layers, dtype=torch.float64)
        for part in self._parts_of(num_rows, 1):
            ids = training_data.block(self.streams.held_out, part.rows, length).to(self.accelerator.device)
            with self._precision_of_weights():
                found = self.held.gathered(partial(exit_sums, self.model, ids[:, :-1], ids[:, 1:]))
            sums += found * part.real
        self.held.released()
        self.model.train()
        # float32, which every backend can reduce
        total = self.accelerator.reduce(sums.float().to(self.accelerator.device), reduction="sum")
        loss, agreement = (total.double().cpu() / (num_rows * length)).tolist()
        return {
            "loss": [round(value, 4) for value in loss],
            "agreement": [round(value, 4) for value in agreement],
        }

    def _save(self, step: int, optimizers: list[torch.optim.Optimizer], seconds: float) -> None:
        folder = Path(self.config.output_dir) / "checkpoints"

        def write_state(path: Path) -> None:
            (path / "state.json").write_text(json.dumps({"step": step, "seconds": seconds}), encoding="utf-8")

        self.held.save(checkpoints.checkpoint_path(folder, step), optimizers, write_state)
        if self.accelerator.is_main_process:
            checkpoints.drop_old_checkpoints(folder)
        self.accelerator.wait_for_everyone()

    def _resume(self, optimizers: list[torch.optim.Optimizer]) -> tuple[int, float]:
        """Load the newest checkpoint, if any; return its number of steps and the seconds spent on them.

        No random state is stored: data order and dropout are functions of seed and step.
        """
        latest = checkpoints.latest_checkpoint(Path(self.config.output_dir) / "checkpoints")
        if latest is None:
            return 0, 0.0
        path, step = latest
        self.held.load(path, optimizers)
        return step, float(json.loads((path / "state.json").read_text(encoding="utf-8"))["seconds"])

    def _export(self, tensors: dict[str, Tensor], dtype: torch.dtype, path: Path) -> None:
        """The finished model with its tokenizer, in export_dtype; its generation settings are init's, or plain greedy."""
        with init_empty_weights():
            exported = LlamaForCausalLM(self.model.config)
        exported.load_state_dict({name: tensor.to("cpu", dtype) for name, tensor in tensors.items()}, assign=True)
        exported.tie_weights()
        exported.generation_config = (
            GenerationConfig(do_sample=False, eos_token_id=self.tokenizer.eos_token_id)
            if self.config.init is None
            else self.model.generation_config
        )
        exported.config.dtype = dtype
        exported.save_pretrained(path)
        self.tokenizer.save_pretrained(path)


def _without_loss(labels: Tensor, real: int) -> Tensor:
    """Labels of which the rows behind the first `real` ones have none."""
    found = labels.clone()
    found[real:] = IGNORED
    return found


def _progress(console: Console, is_main: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    return Progress(*columns, console=console, disable=not (is_main and console.is_terminal))


def _report(console: Console, record: dict[str, Any], max_steps: int) -> None:
    """A line per evaluation; without a terminal, which has no bar, one per logged step."""
    held_out = record.get("held_out")
    if held_out is None and console.is_terminal:
        return
    last = max(record["loss"], key=int)
    remaining = record["seconds"] / record["step"] * (max_steps - record["step"])
    line = f"step {record['step']}/{max_steps}  loss {record['loss'][last]:.3f}  about {remaining / 60:.1f} min left"
    if held_out is not None:
        curve = " ".join(f"{value:.2f}" for value in held_out["agreement"][:-1])
        line += f"\n  held out: loss {held_out['loss'][-1]:.3f}; agreement of exits with the last layer: {curve}"
    console.print(line, highlight=False)


train_command = command_for_config(train)


def main() -> None:
    """Entry of `python -m layerskip_models.training.loop`."""
    app = typer.Typer(add_completion=False)
    app.command()(train_command)
    app(sys.argv[1:])


if __name__ == "__main__":
    main()
