"""`selfspec train-pacer`: data and training of a pre-verifier in one resumable run.

In several processes with `accelerate launch` or `torchrun` in front, the first makes the data and all train on a part of
each batch. docs/training.md explains the options and what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console

from layerskip_models.text_files import write_text
from layerskip_models.training.documents import block_order
from layerskip_models.training.gradients import sum_gradients
from layerskip_models.training.resumable_run import (
    ResumableRun,
    StepReport,
    claim_output_dir,
    make_accelerator,
    progress_bar,
    quiet_console,
)
from layerskip_models.training.saving import write_folder
from policies.bounds import check_layers
from policies.pacer import MAX_LENGTH
from selfspec.cli.arguments import load_generator
from selfspec.cli.option_groups import LoadOptions
from selfspec.generator import SelfSpecGenerator
from selfspec.pacer.examples import make_data, read_traces, sample_prompts
from selfspec.pacer.labels import DraftTrace
from selfspec.pacer.network import (
    PreVerifierConfig,
    PreVerifierModule,
    describe_layer,
    fingerprint,
    save_preverifier,
)
from selfspec.pacer.quality import (
    calibrate_estimates,
    evaluate,
    played_drafts,
    quality_lines,
    scikit_learn_metrics,
    trace_loss,
)
from selfspec.pacer.settings import MODEL_FOLDER, PreVerifierTraining
from selfspec.pacer.tuning import best_settings

_KEPT_BACK = 8


def train_preverifier(config: PreVerifierTraining, console: Console | None = None) -> Path:
    """Run to the end, from where an earlier call was interrupted; return the folder of the finished pre-verifier.

    output_dir receives config.json, data/, log.jsonl, checkpoints/ and, at the end, preverifier/ and quality.json. A resumed
    run is the uninterrupted one. Raises ValueError for data that is missing, an output_dir of another run, or an exit layer
    that the model does not have.
    """
    scikit_learn_metrics()  # the run ends with it: better to miss it now
    console = console or quiet_console()
    accelerator = make_accelerator(config)
    with accelerator.main_process_first():
        output_dir = claim_output_dir(config)
        device = str(accelerator.device) if config.device == "auto" else config.device
        generator = load_generator(
            config.model, LoadOptions(dtype=config.dtype, device=device), console, several_processes=True
        )
        model = generator.model
        layers = check_layers(config.exit_layers, model.num_layers) or (max(model.num_layers // 4, 1),)
        if accelerator.is_main_process:
            _make_data(config, generator, layers, console)
    torch.manual_seed(config.seed)
    described = PreVerifierConfig(
        base_model=config.model_name(),
        fingerprint=fingerprint(model),
        exit_layers=layers,
        layer=describe_layer(model.config),
        max_drafts=config.window,
        **{name: getattr(config, name) for name in ("position_embedding", "features", "estimates", "scope", "block")},
    )
    module = PreVerifierModule(described).to(accelerator.device)
    traces = list(read_traces(config.data_folder / "train"))
    if not traces:
        raise ValueError("no response was long enough to draft in: raise response_tokens, or set ignore_eos")
    mine, kept_back = split_responses(traces, len(layers))
    fit = PreVerifierFit(config, accelerator, module, mine)
    steps = config.num_steps(len(mine), fit.batch)
    ResumableRun(config, accelerator, module, [fit.optimizer], steps=steps, console=console).execute(fit.gradient)
    if accelerator.is_main_process:
        calibrate_estimates(module, kept_back)
        _choose_settings(module, kept_back, model.num_layers, config.window, console)
        write_folder(output_dir / MODEL_FOLDER, partial(save_preverifier, module))
        held_out = list(read_traces(config.data_folder / "held-out"))
        measured = evaluate(module, held_out, mine)
        write_text(output_dir / "quality.json", json.dumps(measured, indent=1) + "\n")
        console.print("\n".join(quality_lines(measured)))
    accelerator.wait_for_everyone()
    return output_dir / MODEL_FOLDER


class PreVerifierFit:
    """What a step of the training computes."""

    def __init__(
        self,
        config: PreVerifierTraining,
        accelerator: Accelerator,
        module: PreVerifierModule,
        traces: Sequence[DraftTrace],
    ) -> None:
        self._accelerator, self._module, self._traces, self._seed = accelerator, module, traces, config.seed
        self.batch = min(config.batch_responses, len(traces))
        matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in module.parameters() if parameter.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        )

    def gradient(self, step: int) -> StepReport:
        """Compute the gradient of one batch, summed over the processes."""
        accelerator = self._accelerator
        chosen = block_order(step, self.batch, len(self._traces), self._seed)
        total = torch.zeros(1, dtype=torch.float32, device=accelerator.device)
        for index in chosen[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.autocast():
                loss = trace_loss(self._module, self._traces[index]) / self.batch
            loss.backward()
            total += loss.detach()
        loss_of_batch = float(sum_gradients(accelerator, self._module, total))
        return StepReport(figures={"loss": round(loss_of_batch, 5)}, summary=f"loss {loss_of_batch:.4f}")


def split_responses(traces: Sequence[DraftTrace], exits: int) -> tuple[list[DraftTrace], list[DraftTrace]]:
    """(to train on, to choose the stopping rule's settings on): every eighth response is kept back.

    exits: the number of a response's traces, which stand together.
    """
    parts: tuple[list[DraftTrace], list[DraftTrace]] = ([], [])
    for place, trace in enumerate(traces):
        parts[place // exits % _KEPT_BACK == _KEPT_BACK - 1].append(trace)
    return parts


def _make_data(
    config: PreVerifierTraining, generator: SelfSpecGenerator, layers: tuple[int, ...], console: Console
) -> None:
    for name in ("train", "held-out"):
        prompts = sample_prompts(config, generator, held_out=name == "held-out")
        with progress_bar(console, len(prompts)) as show:
            advance = partial(show, f"drafting, {name}")
            make_data(generator, prompts, config.data_plan(layers), config.data_folder / name, advance)


def _choose_settings(
    module: PreVerifierModule, traces: Sequence[DraftTrace], num_layers: int, window: int, console: Console
) -> None:
    """Put the stopping rule's best settings, on the responses kept back, into the pre-verifier's config."""
    settings = best_settings(played_drafts(module, traces, window), num_layers, max_length=MAX_LENGTH)
    for setting in settings:
        console.print(
            f"exit layer {setting.exit_layer}: b={setting.b}, t={setting.t}, rho={setting.rho};"
            f" {setting.tokens_per_layer * num_layers:.3f} times plain decoding's tokens per layer"
        )
    if settings:
        policy = {name: getattr(settings[0], name) for name in ("exit_layer", "b", "t", "rho")}
        module.config = replace(module.config, policy=policy)
