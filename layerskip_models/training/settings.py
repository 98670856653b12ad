"""The settings that training runs share, each field with its help text and the values that it allows."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from layerskip_models.checkpoints.named_models import DEMO
from layerskip_models.option_fields import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Range, option

PRECISIONS = ("fp32", "bf16")
DEFAULT_EXCLUDES = ("test", "tests", "idle_test", "site-packages", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A file or folder of text. weight: how often one pass over the data shows it (0.5: half of its documents)."""

    path: Path
    weight: float = 1.0


def parse_data_source(text: str) -> DataSource:
    """`PATH` or `PATH:weight` -> DataSource. Raises ValueError for a missing path or a weight that is not above 0."""
    path, colon, weight = text.rpartition(":")
    try:
        value = float(weight) if colon else 1.0
    except ValueError:
        colon, value = "", 1.0  # a colon that belongs to the path
    path = path if colon else text
    if not 0 < value < float("inf"):
        raise ValueError(f"data weight must be above 0, got {text!r}; leave the path out to give it no weight")
    if not Path(path).exists():
        raise ValueError(f"data path does not exist: {path!r}")
    return DataSource(path=Path(path), weight=value)


def with_default(base: type[Any], name: str, default: Any) -> Any:
    """Return the field of this name of a base class, with another default."""
    return field(default=default, metadata=base.__dataclass_fields__[name].metadata)


def require(holds: bool, name: str, wanted: str, value: object) -> None:
    """Raise ValueError that says what the field must be and is, unless the condition holds."""
    if not holds:
        raise ValueError(f"{name} must be {wanted}, got {value}")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One training run in a folder of its own, which an interruption does not spoil (`training.loop`).

    Wrong values raise ValueError on construction, which names the field.
    operational: fields that may differ when a run is resumed, since they do not change the weights it arrives at.
    preparation, results: names in output_dir of what a run makes before its first step, and of what holds its work.
    """

    data: tuple[str, ...] = option(MISSING, "PATH[:weight] of a .txt, .txt.gz or .py file or a folder.")
    output_dir: str = option(MISSING, "Folder for log, checkpoints and the finished model.")
    exclude: tuple[str, ...] = option(DEFAULT_EXCLUDES, "Names of folders and files to leave out of folders.")
    holdout_fraction: float = option(
        0.02, "Share of documents kept out of training, for evaluation.", Range(0, 1, "()")
    )
    learning_rate: float = option(1e-3, "Peak learning rate; from there it falls to 0 in a half cosine.", ABOVE_0)
    warmup_steps: int = option(20, "Steps in which the learning rate rises.", AT_LEAST_0)
    weight_decay: float = option(0.0, "Decoupled weight decay of matrices.", AT_LEAST_0)
    max_grad_norm: float = option(1.0, "Maximum norm of the gradient.", ABOVE_0)
    seed: int = option(0, "Random seed.", AT_LEAST_0)
    precision: str = option("fp32", "fp32, or bf16 for autocast.", PRECISIONS)
    log_every: int = option(20, "Steps between lines in the log.", AT_LEAST_1)
    save_every: int = option(100, "Steps between checkpoints, the most that an interruption loses.", AT_LEAST_1)

    operational: ClassVar[tuple[str, ...]] = ("output_dir", "log_every", "save_every")
    preparation: ClassVar[tuple[str, ...]] = ("log.jsonl",)
    results: ClassVar[tuple[str, ...]] = ("checkpoints",)

    def __post_init__(self) -> None:
        for item in fields(self):
            allowed, value = item.metadata.get("allowed"), getattr(self, item.name)
            if isinstance(allowed, Range):
                require(value in allowed, item.name, str(allowed), value)
            elif allowed is not None and value not in allowed:
                raise ValueError(f"{item.name} must be one of {', '.join(allowed)}, got {value!r}")
        if not self.data:
            raise ValueError("data must name at least one file or folder (--data PATH[:weight])")
        self.sources()

    def sources(self) -> list[DataSource]:
        """List the files and folders of `data`. ValueError for one that does not exist."""
        return [parse_data_source(path) for path in self.data]

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step 0, 1, ... of a run of `steps` steps."""
        return self.learning_rate * self.warm_up(step) * 0.5 * (1 + math.cos(math.pi * step / steps))

    def warm_up(self, step: int) -> float:
        """Return the share of the peak learning rate that the linear rise has reached."""
        return min(1.0, (step + 1) / (self.warmup_steps + 1))

    def fingerprint(self) -> str:
        """Hash the settings that decide the finished weights. A new option at its default does not change it."""
        decisive = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in self.operational and getattr(self, item.name) != item.default
        }
        return sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class FrozenModelSettings(RunSettings):
    """A run that trains a small network for a frozen model, with data that the model makes first."""

    model: str = option(DEMO, "The frozen checkpoint: hub name, folder or short name.")
    dtype: str = option("auto", "The model's: auto, float32, bfloat16, float16.")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    exit_layers: tuple[int, ...] = option((), "Exit layer to train for; repeatable.")
    evaluate_on: tuple[str, ...] = option((), "Data for the held-out figures (default: held-out documents of data).")
    prompt_tokens: int = option(256, "Maximum prompt length; pieces of text have at least an eighth of it.", AT_LEAST_1)
    epochs: float = option(4.0, "Passes over the data.", ABOVE_0)

    operational: ClassVar[tuple[str, ...]] = (*RunSettings.operational, "device")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.evaluation_sources()

    def evaluation_sources(self) -> list[DataSource]:
        """List the files and folders of `evaluate_on`, perhaps none."""
        return [parse_data_source(path) for path in self.evaluate_on]

    def model_name(self) -> str:
        """Return the model's hub name or the last part of its path, since the path means nothing on another machine."""
        return Path(self.model).name if Path(self.model).exists() else self.model

    def num_steps(self, items: int, batch: int) -> int:
        """Count the steps of `batch` items each that make `epochs` passes over the items, at least one."""
        return max(round(items * self.epochs / batch), 1)
