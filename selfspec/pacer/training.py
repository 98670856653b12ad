"""`selfspec train-pacer`: data and training of a pre-verifier in one resumable run.

In several processes with `accelerate launch` or `torchrun` in front, the first makes the data and all train on a part of
each batch.
docs/pacer.md explains the options and what is measured.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from layerskip_models import DEMO_PATH
from layerskip_models.text_files import write_text
from layerskip_models.training import saving as checkpoints
from layerskip_models.training.documents import block_order
from layerskip_models.training.start import claim_output_dir
from layerskip_models.training.whole_copies import sum_over_processes
from policies.base import check_exit_layer
from policies.pacer import MAX_LENGTH
from selfspec.cli.arguments import load_generator, progress
from selfspec.generator import SelfSpecGenerator
from selfspec.pacer.examples import DataPlan, make_data, read_traces, sample_prompts
from selfspec.pacer.labels import (
    DraftTrace,
    behind_mismatch,
    confidence_estimates,
    confidence_table,
    fit_calibration,
    pack,
    quality,
    running_products,
    scikit_learn_metrics,
)
from selfspec.pacer.network import (
    PreVerifierConfig,
    PreVerifierModule,
    describe_layer,
    fingerprint,
    save_preverifier,
)
from selfspec.pacer.settings import OPERATIONAL_FIELDS, PreVerifierTraining
from selfspec.pacer.tuning import PlayedDraft, best_settings

MODEL_FOLDER = "preverifier"
_KEPT_BACK = 8
_RESULTS = ("data", "checkpoints", MODEL_FOLDER)
"""What holds the work of a run; a folder without any of these may be used for other options."""


def train_preverifier(config: PreVerifierTraining, console: Console | None = None) -> Path:
    """Run to the end, from where an earlier call was interrupted; return the folder of the finished pre-verifier.

    output_dir receives config.json, data/, log.jsonl, checkpoints/ and, at the end, preverifier/ and quality.json. A resumed
    run is the uninterrupted one. Raises ValueError for data that is missing, an output_dir of another run, or an exit layer
    that the model does not have.
    """
    scikit_learn_metrics()  # the run ends with it: better to miss it now
    console = console or Console(stderr=True, highlight=False, markup=False)
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no", cpu=not torch.cuda.is_available()
    )
    output_dir = Path(config.output_dir)
    with accelerator.main_process_first():
        claim_output_dir(config, output_dir, OPERATIONAL_FIELDS, preparation=("log.jsonl",), results=_RESULTS)
        generator = load_generator(config.model, config.dtype, config.device, console, tensor_parallel=None)
        layers = config.exit_layers or (max(generator.model.num_layers // 4, 1),)
        for layer in layers:
            check_exit_layer(layer, generator.model.num_layers)
        if accelerator.is_main_process:
            _make_data(config, generator, tuple(sorted(set(layers))), console)
    torch.manual_seed(config.seed)
    described = PreVerifierConfig(
        base_model=_name(config.model),
        fingerprint=fingerprint(generator.model),
        exit_layers=tuple(sorted(set(layers))),
        layer=json.loads(json.dumps(describe_layer(generator.model.config))),
        max_drafts=config.window,
        position_embedding=config.position_embedding,
        features=config.features,
        estimates=config.estimates,
        scope=config.scope,
        block=config.block,
    )
    module = PreVerifierModule(described).to(accelerator.device)
    traces = list(read_traces(config.data_folder / "train"))
    if not traces:
        raise ValueError("no response was long enough to draft in: raise response_tokens, or set ignore_eos")
    mine, kept_back = split_responses(traces)
    return _Run(config, accelerator, module, mine, kept_back, generator.model.num_layers, output_dir, console).execute()


def split_responses(traces: Sequence[DraftTrace]) -> tuple[list[DraftTrace], list[DraftTrace]]:
    """(to train on, to choose the stopping rule's settings on): every eighth response, with all its layers, is kept back."""
    parts: tuple[list[DraftTrace], list[DraftTrace]] = ([], [])
    number, last = -1, 1 << 30
    for trace in traces:  # a response's layers ascend
        number += trace.exit_layer <= last
        last = trace.exit_layer
        parts[number % _KEPT_BACK == _KEPT_BACK - 1].append(trace)
    return parts


def played_drafts(module: PreVerifierModule, traces: Sequence[DraftTrace], window: int) -> list[PlayedDraft]:
    """What the network says of every draft, for `selfspec.pacer.tuning`."""
    module.eval()
    played = []
    for trace in traces:
        with torch.inference_mode():
            estimates = trace_logits(module, trace).sigmoid().cpu()
        if module.config.estimates == "conditional":
            estimates = running_products(estimates, trace.lengths)
        parts = zip(estimates.split(trace.lengths.tolist()), trace.accepted.tolist(), trace.lengths.tolist())
        played += [
            PlayedDraft(
                exit_layer=trace.exit_layer,
                estimates=tuple(part.tolist()),
                accepted=accepted,
                is_cut=accepted < length < window,
            )
            for part, accepted, length in parts
        ]
    module.train()
    return played


@torch.no_grad()  # not inference mode, in which nothing could be fitted
def calibrate_estimates(module: PreVerifierModule, traces: Sequence[DraftTrace]) -> None:
    """Fit the network's `calibration`, per exit layer, to responses that it did not learn from: it is too sure of itself."""
    module.eval()
    module.calibration.copy_(module.calibration.new_tensor([1.0, 0.0]).expand_as(module.calibration))
    for index, layer in enumerate(module.config.exit_layers):
        those = [trace for trace in traces if trace.exit_layer == layer]
        if module.config.estimates == "conditional":
            those = [behind_mismatch(trace, 0) for trace in those]
        if those:
            logits = torch.cat([trace_logits(module, trace).cpu() for trace in those])
            fitted = fit_calibration(logits, torch.cat([trace.labels() for trace in those]))
            module.calibration[index] = module.calibration.new_tensor(fitted)
    module.train()


def _name(model: str | None) -> str:
    """The hub name, or the last part of a path: where it lies on this machine says nothing to others."""
    return DEMO_PATH.name if model is None else Path(model).name if Path(model).exists() else model


def _make_data(
    config: PreVerifierTraining,
    generator: SelfSpecGenerator,
    layers: tuple[int, ...],
    console: Console,
) -> None:
    assert generator.tokenizer is not None
    plan = DataPlan(
        exit_layers=layers,
        response_tokens=config.response_tokens,
        window=config.window,
        behind=config.behind,
        positions=config.positions,
        ignore_eos=config.ignore_eos,
        shard_responses=config.shard_responses,
        seed=config.seed,
    )
    for name, paths, count in (
        ("train", config.data, config.num_prompts),
        ("held-out", config.evaluate_on or config.data, config.num_held_out),
    ):
        prompts = sample_prompts(
            config.sources(paths),
            generator.tokenizer,
            count=count,
            max_tokens=min(config.prompt_tokens, generator.model.max_positions - 3),
            held_out=name == "held-out",
            holdout_fraction=config.holdout_fraction,
            exclude=config.exclude,
            seed=config.seed,
        )
        with progress(len(prompts), console) as advance:
            shown = 0

            def show(done: int, advance: Any = advance, name: str = name) -> None:
                nonlocal shown
                for _ in range(done - shown):
                    advance(f"drafting, {name}")
                shown = max(shown, done)

            make_data(generator, prompts, plan, config.data_folder / name, show)


@dataclass(slots=True)
class _Run:
    config: PreVerifierTraining
    accelerator: Accelerator
    module: PreVerifierModule
    traces: list[DraftTrace]
    kept_back: list[DraftTrace]
    num_layers: int
    output_dir: Path
    console: Console

    def execute(self) -> Path:
        config = self.config
        size = min(config.batch_responses, len(self.traces))
        steps = max(round(len(self.traces) * config.epochs / size), 1)
        matrices = [p for p in self.module.parameters() if p.ndim == 2]
        others = [p for p in self.module.parameters() if p.ndim != 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.999),
        )
        first = self._resume(optimizer)
        log = self.output_dir / "log.jsonl"
        is_main = self.accelerator.is_main_process
        if is_main:
            checkpoints.rewind_log(log, first)
        started = time.monotonic()
        with progress(steps - first, self.console) as advance:
            for step in range(first, steps):
                rate = config.learning_rate * min(1.0, (step + 1) / (config.warmup_steps + 1))
                rate *= 0.5 * (1 + math.cos(math.pi * step / steps))
                for group in optimizer.param_groups:
                    group["lr"] = rate
                loss = self._step(step, size)
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                done = step + 1
                if is_main:
                    advance(f"training, loss {loss:.4f}")
                    if done % config.log_every == 0 or done == steps:
                        line = {"step": done, "loss": round(loss, 5), "learning_rate": rate}
                        line["seconds"] = round(time.monotonic() - started, 1)
                        with log.open("a", encoding="utf-8") as stream:
                            stream.write(json.dumps(line) + "\n")
                if done % config.save_every == 0 or done == steps:
                    self._save(done, optimizer)
        if is_main:
            target = self.output_dir / MODEL_FOLDER
            calibrate_estimates(self.module, self.kept_back)
            self._choose_settings()
            checkpoints.write_folder(target, lambda path: save_preverifier(self.module, path))
            held_out = list(read_traces(self.config.data_folder / "held-out"))
            measured = evaluate(self.module, held_out, self.traces)
            write_text(self.output_dir / "quality.json", json.dumps(measured, indent=1) + "\n")
            self.console.print("\n".join(quality_lines(measured)))
        self.accelerator.wait_for_everyone()
        return self.output_dir / MODEL_FOLDER

    def _choose_settings(self) -> None:
        """Put the stopping rule's best settings, on the responses kept back, into the pre-verifier's config."""
        played = played_drafts(self.module, self.kept_back, self.config.window)
        settings = best_settings(played, self.num_layers, max_length=MAX_LENGTH)
        for setting in settings:
            self.console.print(
                f"exit layer {setting.exit_layer}: b={setting.b}, t={setting.t}, rho={setting.rho};"
                f" {setting.tokens_per_layer * self.num_layers:.3f} times plain decoding's tokens per layer"
            )
        if settings:
            best = settings[0]
            chosen = {"exit_layer": best.exit_layer, "b": best.b, "t": best.t, "rho": best.rho}
            self.module.config = replace(self.module.config, policy=chosen)

    def _step(self, step: int, size: int) -> float:
        """Gradient of one batch, summed over the processes; returns its loss. The batch follows from (seed, step)."""
        accelerator = self.accelerator
        chosen = block_order(step, size, len(self.traces), self.config.seed)
        total = torch.zeros((), dtype=torch.float32, device=accelerator.device)
        for index in chosen[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.autocast():
                loss = trace_loss(self.module, self.traces[index]) / size
            loss.backward()
            total += loss.detach()
        return float(sum_over_processes(accelerator, self.module.parameters(), total.view(1)))

    def _save(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        folder = self.output_dir / "checkpoints"

        def write(path: Path) -> None:
            torch.save(self.module.state_dict(), path / "module.pt")
            torch.save(optimizer.state_dict(), path / "optimizer.pt")

        if self.accelerator.is_main_process:
            checkpoints.write_folder(checkpoints.checkpoint_path(folder, step), write)
            checkpoints.drop_old_checkpoints(folder)
        self.accelerator.wait_for_everyone()

    def _resume(self, optimizer: torch.optim.Optimizer) -> int:
        latest = checkpoints.latest_checkpoint(self.output_dir / "checkpoints")
        if latest is None:
            return 0
        path, step = latest
        self.module.load_state_dict(torch.load(path / "module.pt", map_location="cpu", weights_only=True))
        optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True))
        return step


def trace_logits(module: PreVerifierModule, trace: DraftTrace) -> Tensor:
    """The network's output for every draft row of a trace, float32 [rows]."""
    config = module.config
    packed = pack(trace, scope=config.scope, block=config.block)
    device = module.head.weight.device
    logits = module(
        packed.hidden.to(device),
        packed.features.to(device),
        packed.draft_index.to(device),
        packed.position.to(device),
        packed.mask.to(device),
        packed.exit_layer,
    )
    return logits[packed.scored.to(device)]


def trace_loss(module: PreVerifierModule, trace: DraftTrace) -> Tensor:
    """Binary cross-entropy, mean over rows: those whose fate is known for conditional estimates, all for prefix estimates."""
    if module.config.estimates == "conditional":
        trace = behind_mismatch(trace, 0)
    logits = trace_logits(module, trace)
    return F.binary_cross_entropy_with_logits(logits, trace.labels().to(logits.device))


@torch.inference_mode()
def evaluate(
    module: PreVerifierModule, held_out: Sequence[DraftTrace], train: Sequence[DraftTrace]
) -> dict[str, dict[str, Any]]:
    """Held-out quality of the network and of SPIDE's table filled from the training data, per exit layer and of all.

    "token": each token up to and including the first mismatch, by its own estimate. "prefix": every drafted token, by the
    estimate that it and all before it are accepted (the running product of its draft's estimates).
    """
    module.eval()
    table = confidence_table(train)
    results: dict[str, dict[str, Any]] = {}
    for layers in [(layer,) for layer in module.config.exit_layers] + [module.config.exit_layers]:
        traces = [trace for trace in held_out if trace.exit_layer in layers]
        if not traces:
            continue
        network = [trace_logits(module, trace).sigmoid().cpu() for trace in traces]
        if module.config.estimates == "conditional":
            products = [running_products(scores, trace.lengths) for scores, trace in zip(network, traces)]
        else:
            products = network
        own = torch.cat(network), torch.cat(products)
        spides = confidence_estimates(traces, table)
        labels = torch.cat([trace.labels() for trace in traces])
        known = torch.cat([trace.fate_known() for trace in traces])
        results["/".join(map(str, layers))] = {
            name: {
                "token": asdict(quality(of_tokens[known], labels[known])),
                "prefix": asdict(quality(of_prefixes, labels)),
            }
            for name, (of_tokens, of_prefixes) in (("preverifier", own), ("confidence", spides))
        }
    module.train()
    return results


def quality_lines(measured: dict[str, dict[str, Any]]) -> list[str]:
    """The held-out figures as a Markdown table."""
    lines = [
        "| exit layer | estimates | AUC, token | calibration error, token | AUC, prefix | calibration error, prefix |"
        " stop precision | stop recall |",
        "| :-- | :-- | --: | --: | --: | --: | --: | --: |",
    ]
    for layers, by_name in measured.items():
        for name, figures in by_name.items():
            token, prefix = figures["token"], figures["prefix"]
            lines.append(
                f"| {layers} | {name} | {token['auc']:.4f} | {token['calibration_error']:.4f} | {prefix['auc']:.4f} |"
                f" {prefix['calibration_error']:.4f} | {token['stop_precision']:.3f} | {token['stop_recall']:.3f} |"
            )
    return lines
