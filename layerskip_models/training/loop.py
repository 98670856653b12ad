"""Train a Llama-family model with the LayerSkip recipe, from scratch or from a checkpoint.

Run as `python -m layerskip_models.training.loop --data PATH --output-dir DIR ...`, in several processes with
`accelerate launch` or `torchrun` in front. docs/training.md explains the options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from accelerate import Accelerator, init_empty_weights
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from layerskip_models.training import documents as training_data
from layerskip_models.training.evaluation import exit_sums
from layerskip_models.training.gradients import sum_gradients
from layerskip_models.training.muon import Muon
from layerskip_models.training.options import command_for_config
from layerskip_models.training.own_text import own_text
from layerskip_models.training.recipe import (
    draw_keep_mask,
    early_exit_backward,
    enabled_exits,
    exit_hidden_states,
    layer_dropout_rates,
    normalised_exit_weights,
    run_layer,
)
from layerskip_models.training.resumable_run import (
    ResumableRun,
    StepReport,
    claim_output_dir,
    make_accelerator,
    quiet_console,
)
from layerskip_models.training.saving import write_folder
from layerskip_models.training.start import described_model, initial_model, own_tokenizer, token_streams
from layerskip_models.training.training_config import OWN_TEXT_PROMPT, TrainingConfig
from layerskip_models.transfer import to_device


def train(config: TrainingConfig) -> Path:
    """Run the training to its end, from the newest checkpoint in output_dir if there is one; return the model's folder.

    output_dir receives config.json, tokenizer/, tokens/, log.jsonl, checkpoints/ and, at the end, model/: a transformers
    checkpoint in export_dtype with its tokenizer. steps/N/ is the same after step N, for each N of keep_at. Where nothing
    else is said, a resumed run is the uninterrupted one.
    Raises ValueError for data that is missing or too short, an output_dir of another run, or an unsupported checkpoint.
    """
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():
        output_dir = claim_output_dir(config)
        tokenizer = own_tokenizer(config, output_dir)
        described = described_model(config, tokenizer)
        streams = token_streams(config, output_dir, tokenizer)
        model = initial_model(config, described)
    model.to(accelerator.device)
    training = LayerSkipTraining(config, accelerator, model, tokenizer, streams)
    if config.compile:
        training.run_layer = torch.compile(run_layer)
    optimizers = training.optimizers()
    run = ResumableRun(config, accelerator, model, optimizers, steps=config.max_steps, console=quiet_console())

    def after_step(done: int) -> StepReport | None:
        if done in config.keep_at:
            training.write_model(output_dir / "steps" / str(done))
        return training.evaluate(done)

    run.execute(training.gradient, after_step)
    training.write_model(output_dir / "model")
    return output_dir / "model"


@dataclass(slots=True)
class LayerSkipTraining:
    """What a step of the recipe computes, and what its evaluations and its finished model are."""

    config: TrainingConfig
    accelerator: Accelerator
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    streams: training_data.TokenStreams
    run_layer: Callable[..., Tensor] = run_layer

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside the layers and AdamW for the rest, or AdamW for all."""
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
                Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay),
                torch.optim.AdamW([plain], lr=config.learning_rate, betas=betas),
            ]
        decayed = {"params": matrices, "weight_decay": config.weight_decay}
        return [torch.optim.AdamW([decayed, plain], lr=config.learning_rate, betas=betas)]

    def gradient(self, step: int) -> StepReport:
        """Compute the gradient of one batch. Reports the mean loss of each enabled exit over the whole batch."""
        config, accelerator = self.config, self.accelerator
        weights = config.weights(len(self.model.model.layers))
        length = config.sequence_length_at(step)
        batch_size = config.batch_tokens // length
        available = training_data.num_blocks(self.streams.train, length)
        order = training_data.block_order(step, batch_size, available, config.seed)
        keep = self._keep_mask(step, batch_size, len(weights))
        exits = enabled_exits(config.curriculum, len(weights), step, config.max_steps, config.rotation)
        shares = normalised_exit_weights(weights, exits)

        totals = {layer: torch.zeros((), device=accelerator.device) for layer in shares}
        for rows in self._micro_batches(batch_size, max(config.micro_batch_tokens // length, 1)):
            ids = training_data.block(self.streams.train, [order[row] for row in rows], length)
            ids = to_device(ids, accelerator.device)
            share = len(rows) / batch_size
            kept = None if keep is None else keep[:, rows]
            found = self._backward(ids[:, :-1], ids[:, 1:], shares, share, keep=kept)
            for layer, loss in found.items():
                totals[layer] += loss * share
        if step >= config.max_steps - config.own_text_steps:
            self._own_text_backward(step, shares)
        losses = dict(zip(totals, sum_gradients(accelerator, self.model, torch.stack(list(totals.values()))).tolist()))
        return StepReport(
            figures={"loss": {str(layer): round(loss, 4) for layer, loss in losses.items()}},
            summary=f"loss {losses[len(weights) - 1]:.3f}",
        )

    def _micro_batches(self, num_rows: int, rows_at_once: int) -> list[list[int]]:
        """List this process's rows of a batch by pass. The processes do not wait for each other: one may have none."""
        mine = list(range(self.accelerator.process_index, num_rows, self.accelerator.num_processes))
        return [mine[start : start + rows_at_once] for start in range(0, len(mine), rows_at_once)]

    def _backward(
        self,
        input_ids: Tensor,
        labels: Tensor | dict[int, Tensor],
        shares: dict[int, float],
        scale: float,
        *,
        keep: Tensor | None = None,
        unwanted: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """`early_exit_backward` of a micro batch. keep: its rows of a keep mask."""
        config = self.config
        with self.accelerator.autocast():
            states = exit_hidden_states(self.model, input_ids, shares, keep, run=self.run_layer)
            return early_exit_backward(
                self.model,
                states,
                labels,
                shares,
                scale=scale,
                chunk_rows=config.loss_chunk_rows,
                unwanted=unwanted,
                row_weights=config.row_weights(),
                drafted=input_ids != self.tokenizer.eos_token_id,  # another document follows it
            )

    def _own_text_backward(self, step: int, shares: dict[int, float]) -> None:
        """Add the gradient of the loss on the model's own continuations of training text."""
        config, accelerator = self.config, self.accelerator
        available = training_data.num_blocks(self.streams.train, OWN_TEXT_PROMPT)
        order = training_data.block_order(step, config.own_text_rows, available, config.seed + 1)
        at_once = max(config.micro_batch_tokens // (OWN_TEXT_PROMPT + config.own_text_tokens), 1)
        parts = self._micro_batches(config.own_text_rows, at_once)
        mine = [order[row] for part in parts for row in part]
        blocks = training_data.block(self.streams.train, mine, OWN_TEXT_PROMPT).to(accelerator.device)
        text = own_text(self.model, blocks[:, :-1], config.own_text_tokens)
        last = max(shares)
        start = 0
        for part in parts:
            rows = slice(start, start + len(part))
            start = rows.stop
            labels = {layer: text.last_labels[rows] if layer == last else text.labels[rows] for layer in shares}
            scale = config.own_text_weight * len(part) / config.own_text_rows
            self._backward(text.input_ids[rows], labels, shares, scale, unwanted=text.loops[rows])

    def _keep_mask(self, step: int, batch_size: int, num_layers: int) -> Tensor | None:
        """Drawn for the whole batch from (seed, step) alone: the same however many processes there are."""
        config = self.config
        if config.layer_dropout == 0:
            return None
        rates = layer_dropout_rates(num_layers, config.layer_dropout, config.dropout_time, step, config.max_steps)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        return draw_keep_mask(rates, batch_size, generator)

    def evaluate(self, done: int) -> StepReport | None:
        """Every eval_every steps, loss and agreement with the last layer for every exit on held-out text, if there is any."""
        config, length = self.config, self.config.sequence_length
        if done % config.eval_every and done != config.max_steps:
            return None
        available = training_data.num_blocks(self.streams.held_out, length)
        num_rows = min(available, max(config.eval_tokens // length, 1))
        if num_rows == 0:
            return None
        self.model.eval()
        num_layers = len(self.model.model.layers)
        sums = torch.zeros(2, num_layers, dtype=torch.float64)
        for rows in self._micro_batches(num_rows, 1):
            ids = training_data.block(self.streams.held_out, rows, length).to(self.accelerator.device)
            sums += exit_sums(self.model, ids[:, :-1], ids[:, 1:])
        self.model.train()
        # float32, which every backend can reduce
        total = self.accelerator.reduce(sums.float().to(self.accelerator.device), reduction="sum")
        loss, agreement = (total.double().cpu() / (num_rows * length)).tolist()
        curve = " ".join(f"{value:.2f}" for value in agreement[:-1])
        return StepReport(
            figures={
                "held_out": {
                    "loss": [round(value, 4) for value in loss],
                    "agreement": [round(value, 4) for value in agreement],
                }
            },
            summary=f"held out: loss {loss[-1]:.3f}; agreement of exits with the last layer: {curve}",
        )

    def write_model(self, path: Path) -> None:
        """Write the model as it is now, whole or not at all. All processes call it together."""
        if self.accelerator.is_main_process:
            write_folder(path, self.export)
        self.accelerator.wait_for_everyone()

    def export(self, path: Path) -> None:
        """Save the model with its tokenizer, in export_dtype; its generation settings are init's, or plain greedy."""
        dtype = getattr(torch, self.config.export_dtype)
        tensors = self.model.state_dict()
        with init_empty_weights():
            exported = LlamaForCausalLM(deepcopy(self.model.config))  # which stays as it is for the steps to come
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


train_command = command_for_config(train)


def main() -> None:
    """Entry of `python -m layerskip_models.training.loop`."""
    app = typer.Typer(add_completion=False)
    app.command()(train_command)
    app(sys.argv[1:])


if __name__ == "__main__":
    main()
