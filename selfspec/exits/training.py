"""`selfspec train-exit`: texts, hidden states and the fitting of exit adapters, in one resumable run.

In several processes with `accelerate launch` or `torchrun` in front, the first computes the states and all fit, each on a
part of every batch. docs/train-exit.md explains the options.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from layerskip_models import DEMO_PATH, LayerSkipModel
from layerskip_models.checkpoints.fingerprint import fingerprint, same_weights
from layerskip_models.exits.adapter import AdapterConfig, ExitAdapters
from layerskip_models.exits.folder import FOLDER, config_for, save_adapters
from layerskip_models.output_paths import output_folder
from layerskip_models.parallel.ranks import launched_ranks
from layerskip_models.text_files import write_text
from layerskip_models.training import saving as checkpoints
from layerskip_models.training.documents import DataSource
from layerskip_models.training.start import claim_output_dir
from selfspec.cli.arguments import load_generator
from selfspec.exits.card import card, figure_lines
from selfspec.exits.fitting import FitSettings, StepFigures, fit, make_optimizer, measure
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import (
    KEPT,
    HiddenStateDataset,
    StatesPlan,
    plan_for,
    states_dtype,
    write_states,
)
from selfspec.exits.own_answers import OwnAnswers
from selfspec.exits.settings import DATA_FIELDS, OPERATIONAL_FIELDS, ExitTraining
from selfspec.exits.training_texts import Example, TextReader, TrainingText, in_shares, sampled_examples
from selfspec.generator import SelfSpecGenerator
from selfspec.messages import template_of

_RESULTS = ("states", "checkpoints", FOLDER)
"""What holds the work of a run; a folder without any of these may be used for other options."""
_PARTS = ("train", "held-out")


def train_exit(config: ExitTraining, console: Console | None = None) -> Path:
    """Run to the end, from where an earlier call was interrupted; return the folder of the finished adapters.

    output_dir receives config.json, states/, log.jsonl, checkpoints/ and, at the end, exits/: the adapters, their card and
    their figures on held-out text. A resumed run is the uninterrupted one. Raises ValueError for data that is missing, an
    output_dir of another run, or layers that the model does not have.
    """
    console = console or Console(stderr=True, highlight=False, markup=False)
    spread = config.device_map is not None
    if spread and launched_ranks() > 1:  # before the processes connect: all of them say it
        raise ValueError(
            "device_map spreads the model over the GPUs from one process: start this without accelerate launch or torchrun"
        )
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        cpu=not torch.cuda.is_available() or config.device == "cpu",
        # The others wait while the first process computes the states.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=7))],
    )
    output_dir = Path(config.output_dir)
    with accelerator.main_process_first():
        claim_output_dir(config, output_dir, OPERATIONAL_FIELDS, preparation=("log.jsonl",), results=_RESULTS)
        if config.beside:
            output_folder(config.checkpoint_folder() / FOLDER)
        device = str(accelerator.device) if config.device == "auto" and not spread else config.device
        # Without adapters that lie beside it, from an earlier run say: the bare exits are what is improved.
        generator = load_generator(
            config.model,
            config.dtype,
            device,
            console,
            exits="none",
            tensor_parallel=None,
            device_map="auto" if spread else None,
        )
        model = generator.model
        described = describe_adapters(config, model, config.form)
        plan = _plan(config, model)
        if accelerator.is_main_process:
            _make_states(config, generator, plan, console)
        plan = _recorded_plan(config, model, plan_for([described], model, plan.dtype))
    head = FrozenHead(model, torch.bfloat16 if config.precision == "bf16" else torch.float32)
    stored = model.weights_dtype if model.weights_dtype.itemsize == 2 else None
    num_layers = model.num_layers
    del generator, model  # the head is all that fitting needs
    torch.manual_seed(config.seed)
    adapters = ExitAdapters(described).to(head.weight.device)
    depths = sorted({*described.exit_layers, *described.steering_layers, num_layers})
    train, held_out = (
        HiddenStateDataset(config.states_folder / part, plan, depths, length=config.sequence_length, seed=config.seed)
        for part in _PARTS
    )
    run = _Run(config, accelerator, adapters, depths, head, train, held_out, output_dir, console)
    return run.execute(stored)


def describe_adapters(config: ExitTraining, model: LayerSkipModel, form: Any) -> AdapterConfig:
    """Adapters of a form for a model, as the options say. ValueError for layers that it does not have."""
    options: dict[str, Any] = {}
    if form == "steered":
        options = {"steering_layers": config.steering(model), "steering_size": config.steering_size}
    if form == "layer":
        rope = getattr(model.config, "rope_parameters", None) or {}
        options = {
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
        }
    return config_for(
        model,
        form=form,
        exit_layers=config.layers(model),
        rank=config.width(model),
        base_model=_name(config.model),
        **options,
    )


def _name(model: str | None) -> str:
    """The hub name, or the last part of a path: where it lies on this machine says nothing to others."""
    return DEMO_PATH.name if model is None else Path(model).name if Path(model).exists() else model


def _plan(config: ExitTraining, model: LayerSkipModel) -> StatesPlan:
    forms = {config.form, *config.keep_for}
    dtype = states_dtype(model) if config.states_dtype == "auto" else getattr(torch, config.states_dtype)
    return plan_for([describe_adapters(config, model, form) for form in sorted(forms)], model, dtype)


def _recorded_plan(config: ExitTraining, model: LayerSkipModel, needed: StatesPlan) -> StatesPlan:
    """How the states in the folder were kept. ValueError unless they are of this model and hold what is needed."""
    folder = config.states_folder
    path = folder / "states.json"
    if not path.exists():
        raise ValueError(f"{folder} holds no states: let the run that states_of names make them first")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    if not same_weights(recorded["fingerprint"], fingerprint(model)):
        raise ValueError(f"{folder} holds states of another model: choose another output_dir, or delete it")
    missing = sorted({*needed.depths} - {*recorded["depths"]})
    if missing:
        raise ValueError(
            f"{folder} holds no states after layers {', '.join(map(str, missing))}: name them in the run that makes them"
        )
    if KEPT.index(recorded["kept"]) < KEPT.index(needed.kept):
        raise ValueError(f"{folder} lacks rows that form {config.form} needs: make it with --keep-for {config.form}")
    return StatesPlan(depths=tuple(recorded["depths"]), kept=recorded["kept"], dtype=getattr(torch, recorded["dtype"]))


def _make_states(config: ExitTraining, generator: SelfSpecGenerator, plan: StatesPlan, console: Console) -> None:
    folder, model = config.states_folder, generator.model
    if config.states_of is not None:
        if not all((folder / part / "done.json").exists() for part in _PARTS):
            raise ValueError(f"{folder} holds no complete states: let the run that states_of names make them first")
        return
    if not (folder / "states.json").exists():
        described = {
            "fingerprint": fingerprint(model),
            "depths": plan.depths,
            "kept": plan.kept,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "data": {name: getattr(config, name) for name in DATA_FIELDS},
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "states.json", json.dumps(described, indent=1) + "\n")
    _recorded_plan(config, model, plan)
    per_row = plan.bytes_per_row(model.hidden_size)
    budget = config.disk_gb * 1e9
    console.print(
        f"hidden states: {per_row / 1e3:.1f} KB a row; {config.disk_gb:g} GB hold {budget / per_row:,.0f} rows"
    )
    for part, most in (("held-out", config.held_out_tokens), ("train", config.max_tokens)):
        with _progress(console, most) as show:
            done = (folder / part / "done.json").exists()  # then the data need not be read again
            texts = iter(()) if done else _texts(config, generator, held_out=part == "held-out", show=show)
            result = write_states(
                model,
                texts,
                plan,
                folder / part,
                most_tokens=most,
                most_bytes=budget,
                advance=partial(show, f"hidden states, {part}"),
            )
        budget -= result["bytes"]
        told = {
            "data": "all of the data",
            "tokens": "enough tokens",
            "budget": f"stopped at the disk budget of {config.disk_gb:g} GB",
        }[result["ended"]]
        console.print(
            f"{part}: {result['tokens']:,} tokens of {result['texts']:,} texts, {result['bytes'] / 1e6:,.0f} MB; {told}"
        )
        if result["tokens"] == 0:
            raise ValueError(
                f"nothing was kept of the {part} data: raise disk_gb"
                if result["ended"] == "budget"
                else f"the {part} data has no answers to learn from: give more, or use --own-answers"
            )


def _texts(
    config: ExitTraining, generator: SelfSpecGenerator, *, held_out: bool, show: Callable[[str, int], None]
) -> Iterator[TrainingText]:
    """Training texts in the order in which they are used, each source giving its share of the tokens."""
    assert generator.tokenizer is not None
    reader = TextReader(
        tokenizer=generator.tokenizer,
        template=template_of(config.model, config.chat_template),
        length=min(config.sequence_length, generator.model.max_positions),
    )
    sources: list[DataSource] = config.sources(config.evaluate_on if held_out and config.evaluate_on else config.data)
    whole = bool(held_out and config.evaluate_on)  # all of it is for evaluation
    examples = sampled_examples(
        sources,
        held_out=held_out,
        holdout_fraction=2.0 if whole else 0.0 if config.evaluate_on else config.holdout_fraction,
        exclude=config.exclude,
        seed=config.seed,
    )
    shares = [source.weight for source in sources]
    if not config.own_answers:
        return in_shares([_read(reader, found) for found in examples], shares, lambda text: text.num_scored)
    room = max(reader.length - config.answer_tokens, 1)
    draw = np.random.default_rng([config.seed, held_out])
    most = min(config.prompt_tokens, room)
    prompts = in_shares([_ask(reader, found, most, draw) for found in examples], shares, lambda prompt: 1)
    answers = OwnAnswers(
        generator,
        config.states_folder / f"answers-{_PARTS[held_out]}.jsonl",
        most_tokens=min(config.answer_tokens, reader.length - 1),
        temperature=config.temperature,
        batch_size=config.answer_batch,
        seed=config.seed + (1 << 20) * held_out,
    )
    written = 0

    def count(tokens: int) -> None:
        nonlocal written
        written += tokens
        show("writing answers", written)

    return answers.texts(prompts, count)


def _read(reader: TextReader, examples: list[Example]) -> Iterator[TrainingText]:
    for example in examples:
        yield from reader.texts(example)


def _ask(reader: TextReader, examples: list[Example], most: int, draw: np.random.Generator) -> Iterator[list[int]]:
    for example in examples:
        yield from reader.prompts(example, most, draw)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar with the time left; yields show(what is done, how far)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=total or None)
        yield lambda label, done: bar.update(task, completed=done, description=label)


@dataclass(slots=True)
class _Run:
    config: ExitTraining
    accelerator: Accelerator
    adapters: ExitAdapters
    depths: list[int]
    head: FrozenHead
    train: HiddenStateDataset
    held_out: HiddenStateDataset
    output_dir: Path
    console: Console

    def execute(self, stored: torch.dtype | None) -> Path:
        """stored: dtype of the finished weights, None for float32."""
        config = self.config
        batch = min(max(config.batch_tokens // config.sequence_length, 1), len(self.train))
        settings = FitSettings(
            steps=max(round(len(self.train) * config.epochs / batch), 1),
            batch=batch,
            **{
                name: getattr(config, name)
                for name in FitSettings.__dataclass_fields__
                if name not in ("steps", "batch")
            },
        )
        optimizer = make_optimizer(self.adapters, settings)
        first, before = self._resume(optimizer)
        is_main = self.accelerator.is_main_process
        log = self.output_dir / "log.jsonl"
        if is_main:
            checkpoints.rewind_log(log, first)
        started = time.monotonic() - before
        with _progress(self.console if is_main else Console(quiet=True), settings.steps) as show:

            def after_step(done: int, figures: StepFigures) -> None:
                seconds = time.monotonic() - started
                last = done == settings.steps
                if is_main:
                    show(f"fitting, KL {figures.mean_kl:.3f}", done)
                    if done % config.log_every == 0 or last:
                        line = {"step": done, "seconds": round(seconds, 1), **_rounded(asdict(figures))}
                        with log.open("a", encoding="utf-8") as stream:
                            stream.write(json.dumps(line) + "\n")
                        if not self.console.is_terminal:
                            left = seconds / done * (settings.steps - done) / 60
                            self.console.print(
                                f"step {done}/{settings.steps}  KL {figures.mean_kl:.3f}  about {left:.1f} min left"
                            )
                if done % config.save_every == 0 or last:
                    self._save(done, seconds, optimizer)

            fit(
                self.adapters,
                self.train,
                self.depths,
                self.head,
                settings,
                accelerator=self.accelerator,
                optimizer=optimizer,
                first_step=first,
                after_step=after_step,
            )
        if is_main:
            self._finish(stored)
        self.accelerator.wait_for_everyone()
        return self.output_dir / FOLDER

    def _finish(self, stored: torch.dtype | None) -> None:
        config, target = self.config, self.output_dir / FOLDER
        figures = measure(self.adapters, self.held_out, self.depths, self.head)
        lines = figure_lines(figures)

        def write(path: Path) -> None:
            save_adapters(self.adapters, path, stored)
            measured = {str(layer): asdict(found) for layer, found in figures.items()}
            (path / "figures.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
            done = [json.loads((config.states_folder / part / "done.json").read_text()) for part in _PARTS]
            (path / "README.md").write_text(card(config, self.adapters.config, lines, *done), encoding="utf-8")

        checkpoints.write_folder(target, write)
        if config.beside:

            def copy(path: Path) -> None:
                shutil.copytree(target, path, dirs_exist_ok=True)

            checkpoints.write_folder(config.checkpoint_folder() / FOLDER, copy)
        self.console.print("\n".join(lines), soft_wrap=True)

    def _save(self, step: int, seconds: float, optimizer: torch.optim.Optimizer) -> None:
        folder = self.output_dir / "checkpoints"

        def write(path: Path) -> None:
            torch.save(self.adapters.state_dict(), path / "adapters.pt")
            torch.save(optimizer.state_dict(), path / "optimizer.pt")
            (path / "state.json").write_text(json.dumps({"seconds": seconds}), encoding="utf-8")

        if self.accelerator.is_main_process:
            checkpoints.write_folder(checkpoints.checkpoint_path(folder, step), write)
            checkpoints.drop_old_checkpoints(folder)
        self.accelerator.wait_for_everyone()

    def _resume(self, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """Load the newest checkpoint, if any; its number of steps and seconds. Random draws are functions of the step."""
        latest = checkpoints.latest_checkpoint(self.output_dir / "checkpoints")
        if latest is None:
            return 0, 0.0
        path, step = latest
        self.adapters.load_state_dict(torch.load(path / "adapters.pt", map_location="cpu", weights_only=True))
        optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True))
        return step, float(json.loads((path / "state.json").read_text(encoding="utf-8"))["seconds"])


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _rounded(item) for name, item in value.items()}
    return round(value, 5)
