"""Train a Llama-family model with the LayerSkip recipe, from scratch or from a checkpoint.

`selfspec train` is the command; docs/training.md explains its options. In several processes with `accelerate launch` or
`torchrun` in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator, init_empty_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from layerskip_models.training import exit_losses
from layerskip_models.training.documents import block, block_order, num_blocks
from layerskip_models.training.loop import Batch, Report, fit, make_accelerator, my_share, quiet_console
from layerskip_models.training.looped import describe_loops, layers_with_exits
from layerskip_models.training.recipe import enabled_exits, layer_dropout_rates, normalised_exit_weights
from layerskip_models.training.run_folder import claim_output_dir, write_folder
from layerskip_models.training.start import initial_model, own_tokenizer, token_streams
from layerskip_models.training.training_config import TrainingConfig

# Coefficients of the quintic X <- aX + b(XX')X + c(XX')^2 X, whose repetition takes singular values towards 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def train(config: TrainingConfig) -> Path:
    """Run the training to its end, from the newest checkpoint in output_dir if there is one; return the model's folder.

    output_dir receives config.json, tokenizer/, tokens/, log.jsonl, checkpoints/ and, at the end, model/: a transformers
    checkpoint in export_dtype with its tokenizer. steps/N/ is the same after step N, for each N of keep_at. A resumed run is
    the uninterrupted one.
    Raises ValueError for data that is missing or too short, an output_dir of another run, or an unsupported checkpoint.
    """
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():
        output_dir = claim_output_dir(config)
        tokenizer = own_tokenizer(config, output_dir)
        train_tokens, held_out_tokens = token_streams(config, output_dir, tokenizer)
        model = initial_model(config, tokenizer).to(accelerator.device)
        if config.loops > 1:
            model.config.num_loops = config.loops
    training = LayerSkipTraining(config, accelerator, model, tokenizer, train_tokens, held_out_tokens)

    def evaluate(done: int) -> Report | None:
        if done in config.keep_at:
            training.write_model(output_dir / "steps" / str(done))
        return training.evaluate(done)

    fit(
        config,
        accelerator,
        EarlyExitLoss(model, config, tokenizer.eos_token_id),
        optimizers_for(model, config),
        training.batches,
        training.report,
        steps=config.max_steps,
        console=quiet_console(),
        evaluate=evaluate,
    )
    training.write_model(output_dir / "model")
    return output_dir / "model"


class EarlyExitLoss(nn.Module):
    """The losses of a model's exits, all through its one norm and head. eos: the token after which a text ends."""

    def __init__(self, model: LlamaForCausalLM, config: TrainingConfig, eos: int) -> None:
        super().__init__()
        self.model, self.config, self.eos = model, config, eos
        self._run_layer = torch.compile(exit_losses.run_layer) if config.compile else exit_losses.run_layer

    def forward(
        self, input_ids: Tensor, labels: Tensor, weights: Mapping[int, float], keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return sum_l weights[l] * loss(l), and the exits' mean cross-entropies, [exits], without the rows' weights.

        input_ids, labels: int64 [batch, length]. weights: of the enabled exits, by layer. keep: see `exit_hidden_states`.
        Logits exist for one exit and loss_chunk_rows rows at a time: backward computes them again.
        """
        states = exit_losses.exit_hidden_states(self.model, input_ids, weights, keep, run=self._run_layer)
        last, total, means = layers_with_exits(self.model)[-1], [], []
        for layer, weight in weights.items():
            chunks = (part.flatten(0, 1).split(self.config.loss_chunk_rows) for part in (states[layer], labels))
            losses = torch.cat([checkpoint(self._losses, *chunk, use_reentrant=False) for chunk in zip(*chunks)])
            means.append(losses.detach().mean())
            if layer < last and self.config.exit_loss != "uniform":
                # Another document follows an end of text: no draft goes on there. Rows that no draft contains count as 1.
                drafted = input_ids != self.eos
                apart = losses.detach().view_as(labels)
                rows = exit_losses.accepted_length_weights(apart, drafted, arm=self.config.exit_loss)
                losses = losses * torch.where(drafted, rows, 1.0).flatten()
            total.append(weight * losses.mean())
        return torch.stack(total).sum(), torch.stack(means)

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.model.lm_head(self.model.model.norm(hidden)).float()
        return F.cross_entropy(logits, labels, reduction="none")


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Nearly U V' of matrix = U S V': singular values in about [0.7, 1.2], by Newton-Schulz iteration; same shape."""
    a, b, c = _QUINTIC
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: w <- (1 - lr * weight_decay) w - lr * 0.2 sqrt(max(rows, columns)) * U V'.

    The factor 0.2 sqrt(max(...)) gives a step the usual size of an AdamW step, so that both can share a learning rate.
    Every parameter must be a matrix. Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
    networks"; the factor from Liu et al. 2025, "Muon is Scalable for LLM Training".
    torch.optim.Muon is the same (`adjust_lr_fn="match_rms_adamw"`), but always works in bfloat16. A processor without
    bfloat16 arithmetic emulates that: a step over 4 layers of the demo's shape takes 2.59 seconds of a core, and 0.15 here.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the parameters' gradients. closure: not supported."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("momentum", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["momentum"])
                    update = orthogonalise(parameter.grad.lerp(average, group["momentum"]))  # Nesterov's momentum
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def optimizers_for(model: LlamaForCausalLM, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers and AdamW for the rest, or AdamW for all."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and name.startswith("model.layers.")
        (matrices if is_matrix else others).append(parameter)
    plain = {"params": others, "weight_decay": 0.0}
    betas = (0.9, 0.95)
    if config.optimizer == "muon":
        muon = Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay)
        return [muon, torch.optim.AdamW([plain], lr=config.learning_rate, betas=betas)]
    decayed = {"params": matrices, "weight_decay": config.weight_decay}
    return [torch.optim.AdamW([decayed, plain], lr=config.learning_rate, betas=betas)]


class LayerSkipTraining:
    """The batches of a training, what is reported of them, its evaluations and its finished model."""

    def __init__(
        self,
        config: TrainingConfig,
        accelerator: Accelerator,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        train_tokens: np.ndarray,
        held_out_tokens: np.ndarray,
    ) -> None:
        self.config, self.accelerator, self.model, self.tokenizer = config, accelerator, model, tokenizer
        self.train_tokens, self.held_out_tokens = train_tokens, held_out_tokens
        self.exits = layers_with_exits(model)
        self.weights = config.weights(len(model.model.layers))

    def exit_shares(self, step: int) -> dict[int, float]:
        """Weights of the exits that have a loss at a step, which sum to 1: of a looped model all, and all the same."""
        config, count = self.config, len(self.weights)
        if config.loops > 1:
            return dict.fromkeys(self.exits, 1 / config.loops)
        exits = enabled_exits(config.curriculum, count, step, config.max_steps, config.rotation)
        return normalised_exit_weights(self.weights, exits)

    def batches(self, step: int) -> list[Batch]:
        """Cut this process's rows of a step into passes of micro_batch_tokens."""
        config, device = self.config, self.accelerator.device
        length = config.sequence_length_at(step)
        batch_size = config.batch_tokens // length
        available = num_blocks(self.train_tokens, length)
        order = block_order(step, batch_size, available, config.seed)
        keep, shares = self._keep_mask(step, batch_size), self.exit_shares(step)
        mine = my_share(self.accelerator, range(batch_size))
        at_once = max(config.micro_batch_tokens // length, 1)
        parts: list[Batch] = []
        for rows in (mine[start : start + at_once] for start in range(0, len(mine), at_once)):
            ids = block(self.train_tokens, [order[row] for row in rows], length).to(device)
            kept = None if keep is None else keep[:, rows]
            parts.append((len(rows) / batch_size, (ids[:, :-1], ids[:, 1:], shares, kept)))
        return parts

    def _keep_mask(self, step: int, batch_size: int) -> Tensor | None:
        """Drawn for the whole batch from (seed, step) alone: the same however many processes there are."""
        config = self.config
        if config.layer_dropout == 0:
            return None
        count, generator = len(self.weights), torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        rates = layer_dropout_rates(count, config.layer_dropout, config.dropout_time, step, config.max_steps)
        return exit_losses.draw_keep_mask(rates, batch_size, generator)

    def report(self, step: int, losses: list[float]) -> Report:
        """Report the mean loss of each enabled exit over the whole batch."""
        by_layer = {str(layer): round(loss, 4) for layer, loss in zip(self.exit_shares(step), losses)}
        return Report(figures={"loss": by_layer}, summary=f"loss {losses[-1]:.3f}")

    def evaluate(self, done: int) -> Report | None:
        """Every eval_every steps, loss and agreement with the last layer for every exit on held-out text, if there is any."""
        config, length = self.config, self.config.sequence_length
        if done % config.eval_every and done != config.max_steps:
            return None
        available = num_blocks(self.held_out_tokens, length)
        num_rows = min(available, max(config.eval_tokens // length, 1))
        if num_rows == 0:
            return None
        self.model.eval()
        sums = torch.zeros(2, len(self.exits), dtype=torch.float64)
        for row in range(self.accelerator.process_index, num_rows, self.accelerator.num_processes):
            ids = block(self.held_out_tokens, [row], length).to(self.accelerator.device)
            sums += exit_losses.exit_sums(self.model, ids[:, :-1], ids[:, 1:])
        self.model.train()
        # float32, which every backend can reduce
        total = self.accelerator.reduce(sums.float().to(self.accelerator.device), reduction="sum")
        loss, agreement = (total.double().cpu() / (num_rows * length)).tolist()
        curve = " ".join(f"{value:.2f}" for value in agreement[:-1])
        rounded = {name: [round(x, 4) for x in values] for name, values in (("loss", loss), ("agreement", agreement))}
        said = f"held out: loss {loss[-1]:.3f}; agreement of exits with the last layer: {curve}"
        return Report(figures={"held_out": rounded}, summary=said)

    def write_model(self, path: Path) -> None:
        """Write the model as it is now, whole or not at all. All processes call it together."""
        if self.accelerator.is_main_process:
            write_folder(path, self._export)
        self.accelerator.wait_for_everyone()

    def _export(self, path: Path) -> None:
        """Save the model with its tokenizer, in export_dtype; its generation settings are init's, or plain greedy."""
        dtype = getattr(torch, self.config.export_dtype)
        tensors = self.model.state_dict()
        with init_empty_weights():
            exported = LlamaForCausalLM(deepcopy(self.model.config))  # which stays as it is for the steps to come
        exported.load_state_dict({name: tensor.to("cpu", dtype) for name, tensor in tensors.items()}, assign=True)
        exported.tie_weights()
        exported.generation_config = self.model.generation_config
        if self.config.init is None:
            exported.generation_config = GenerationConfig(do_sample=False, eos_token_id=self.tokenizer.eos_token_id)
        exported.config.dtype = dtype
        exported.save_pretrained(path)
        if self.config.loops > 1:
            describe_loops(path, self.model)
        self.tokenizer.save_pretrained(path)
