"""`selfspec train-pacer`: data and training of a pre-verifier in one resumable run.

In several processes with `accelerate launch` or `torchrun` in front, the first makes the data and all train on a part of
each batch. docs/training.md explains the options and what is measured.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from layerskip_models.text_files import write_text
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
from policies.bounds import check_layers
from policies.pacer import BLOCK, GROWTH, MAX_LENGTH, THRESHOLD
from selfspec.cli.arguments import load_generator
from selfspec.cli.option_groups import LoadOptions
from selfspec.pacer import OURS, PAPER
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
    best_settings,
    calibrate_estimates,
    evaluate,
    played_drafts,
    quality_lines,
    trace_logits,
)
from selfspec.pacer.settings import MODEL_FOLDER, PreVerifierTraining

_KEPT_BACK = 8  # every eighth response is not trained on


class PreVerifierLoss(nn.Module):
    """Binary cross-entropy of a trace: the mean over the rows whose fate is known; over all rows in the paper's design."""

    def __init__(self, module: PreVerifierModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, trace: DraftTrace) -> tuple[Tensor, Tensor]:
        """Return the loss, and it again, [1], for the log."""
        if self.module.config.design == OURS:
            trace = trace.up_to_mismatch()
        logits = trace_logits(self.module, trace)
        loss = F.binary_cross_entropy_with_logits(logits, trace.labels().to(logits.device))
        return loss, loss.detach().view(1)


def train_preverifier(config: PreVerifierTraining, console: Console | None = None) -> Path:
    """Run to the end, from where an earlier call was interrupted; return the folder of the finished pre-verifier.

    output_dir receives config.json, data/, log.jsonl, checkpoints/ and, at the end, preverifier/ and quality.json. A resumed
    run is the uninterrupted one. Raises ValueError for data that is missing, an output_dir of another run, or an exit layer
    that the model does not have.
    """
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
        data = output_dir / "data"
        for name in ("train", "held-out") if accelerator.is_main_process else ():
            prompts = sample_prompts(config, generator, held_out=name == "held-out")
            with progress_bar(console, len(prompts)) as show:
                advance = partial(show, f"drafting, {name}")
                make_data(generator, prompts, replace(config, exit_layers=layers), data / name, advance)
    torch.manual_seed(config.seed)
    described = PreVerifierConfig(
        base_model=config.model_name(),
        fingerprint=fingerprint(model),
        exit_layers=layers,
        layer=describe_layer(model.config),
        max_drafts=config.window,
        policy={"exit_layer": layers[0], "b": BLOCK, "t": THRESHOLD, "rho": GROWTH} if config.design == PAPER else {},
        design=config.design,
    )
    module = PreVerifierModule(described).to(accelerator.device)
    traces = list(read_traces(data / "train"))
    if not traces:
        raise ValueError("no response was long enough to draft in: raise response_tokens, or set ignore_eos")
    mine: list[DraftTrace] = []
    kept_back: list[DraftTrace] = []  # to choose the stopping rule's settings on
    for place, trace in enumerate(traces):  # those of a response stand together
        (kept_back if place // len(layers) % _KEPT_BACK == _KEPT_BACK - 1 else mine).append(trace)
    batch = min(config.batch_responses, len(mine))

    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in module.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]

    def batches(step: int) -> list[Batch]:
        chosen = block_order(step, batch, len(mine), config.seed)
        return [(1 / batch, (mine[index],)) for index in my_share(accelerator, chosen)]

    fit(
        config,
        accelerator,
        PreVerifierLoss(module),
        [torch.optim.AdamW(groups)],
        batches,
        lambda step, figures: Report(figures={"loss": round(figures[0], 5)}, summary=f"loss {figures[0]:.4f}"),
        steps=config.num_steps(len(mine), batch),
        console=console,
    )
    if accelerator.is_main_process:
        if config.design == OURS:
            calibrate_estimates(module, kept_back)
            played = played_drafts(module, kept_back, config.window)
            settings = best_settings(played, model.num_layers, max_length=MAX_LENGTH)
            for rate, setting in settings:
                chosen = ", ".join(f"{name} {value}" for name, value in setting.items())
                console.print(f"{chosen}: {rate * model.num_layers:.3f} times plain decoding's tokens per layer")
            if settings:
                module.config = replace(module.config, policy=settings[0][1])
        write_folder(output_dir / MODEL_FOLDER, partial(save_preverifier, module))
        measured = evaluate(module, list(read_traces(data / "held-out")))
        write_text(output_dir / "quality.json", json.dumps(measured, indent=1) + "\n")
        console.print("\n".join(quality_lines(measured)))
    accelerator.wait_for_everyone()
    return output_dir / MODEL_FOLDER
