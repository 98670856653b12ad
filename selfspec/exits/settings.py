"""ExitTraining: every option of `selfspec train-exit`, with its meaning and its check."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from layerskip_models import LayerSkipModel
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.exits.adapter import DRAFTED, FORMS
from layerskip_models.training.accepted_length import ARMS
from layerskip_models.training.documents import DEFAULT_EXCLUDES, DataSource, parse_data_source
from layerskip_models.training.training_config import option, require

STATES_DTYPES = ("auto", "float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTraining:
    """One run, data and training. Checked on construction: ValueError says which field, its range, what to do."""

    model: str | None = field(
        default=None,
        metadata={"help": "The frozen checkpoint: hub name or folder (default: the demo model).", "argument": True},
    )
    data: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "PATH[:share] of training data; repeatable. A .jsonl[.gz] file with messages, prompt and completion, "
            "prompt alone (for --own-answers) or text in each line; a .txt, .txt.gz or .py file; a folder of those."
        },
    )
    output_dir: str = field(metadata={"help": "Folder for states, log, checkpoints and the finished exits/."})
    beside: bool = option(
        False, "When finished, copy exits/ into the checkpoint's folder, where it is found by itself."
    )
    dtype: str = option("auto", "The model's: auto, float32, bfloat16, float16.")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")

    device_map: str | None = option(
        None, "auto: spread the frozen model over all GPUs of this machine, where one does not hold it (one process)."
    )

    form: str = option(
        "low_rank",
        "low_rank; for measurements also steered (by the row verified last) and layer (with attention of its own).",
    )
    exit_layers: tuple[int, ...] = option(
        (),
        "Exit to train an adapter for; repeatable (default: up to four, evenly, in the first quarter of the layers).",
    )
    rank: int = option(
        0, "Width of the adapter; 0 for a quarter of the hidden size, with a tenth of a layer's weights at most."
    )
    steering_layers: tuple[int, ...] = option(
        (), "Depth whose state steers, for form steered; repeatable (default: 3, L/2 and L-2)."
    )
    steering_size: int = option(64, "Width of the projection of the steering states.")

    exclude: tuple[str, ...] = option(DEFAULT_EXCLUDES, "Names of folders and files to leave out of folders.")
    evaluate_on: tuple[str, ...] = option(
        (), "Data for the held-out figures, as for data (default: held-out documents of data)."
    )
    holdout_fraction: float = option(0.02, "Share of the documents kept out of training, for evaluation.")
    chat_template: str | None = option(None, '"plain" or a Jinja file, for messages (default: the tokenizer\'s own).')
    own_answers: bool = option(False, "Let the model write the answers itself, and train on those.")
    answer_tokens: int = option(192, "Maximum length of such an answer in tokens.")
    prompt_tokens: int = option(256, "Maximum length of their prompts; longer ones are cut to their end.")
    temperature: float = option(0.0, "Of such answers; 0 is greedy.")
    answer_batch: int = option(8, "Answers that are written at a time.")

    max_tokens: int = option(400_000, "Tokens to train on, at most; 0 for all that the data and the disk budget give.")
    held_out_tokens: int = option(20_000, "Tokens to evaluate on, at most.")
    sequence_length: int = option(512, "Tokens of a text, and rows of a packed sequence. Longer texts are cut.")
    disk_gb: float = option(20.0, "Disk budget for hidden states, in gigabytes.")
    states_dtype: str = option("auto", "Of states on disk: auto (16 bits), float16, bfloat16 or float32.")
    states_of: str | None = option(
        None, "Folder of another run whose states to use, instead of making the same again (see --keep-for)."
    )
    keep_for: tuple[str, ...] = option((), "Other form whose runs shall be able to use this run's states; repeatable.")

    epochs: float = option(3.0, "Passes over the data.")
    batch_tokens: int = option(2048, "Rows per optimiser step, over all processes.")
    positions: int = option(0, "Scored rows that a step uses of each sequence, a random stretch; 0 for all.")
    learning_rate: float = option(
        5e-3, "Peak learning rate; it rises over warmup_steps and falls to 0 in a half cosine."
    )
    warmup_steps: int = option(20, "Steps in which the learning rate rises.")
    weight_decay: float = option(0.0, "Decoupled weight decay.")
    max_grad_norm: float = option(1.0, "Maximum norm of the gradient.")
    kl_weight: float = option(1.0, "Weight of KL(model || exit).")
    ce_weight: float = option(0.1, "Weight of the cross-entropy on the model's own tokens.")
    arm: str = option("uniform", "Weights of positions: uniform, or D-PACE's: cumulative, full (docs/train-exit.md).")
    alpha: float = option(0.5, "Smoothing of D-PACE's weights, in [0, 1].")
    block: int = option(8, "Draft length that D-PACE's weights count with.")
    precision: str = option("fp32", "fp32, or bf16 for autocast.")
    log_every: int = option(20, "Steps between lines in the log.")
    save_every: int = option(100, "Steps between checkpoints, the most that an interruption loses.")
    seed: int = option(0, "Random seed.")

    def __post_init__(self) -> None:
        if not self.data and self.states_of is None:
            raise ValueError("data must name at least one file or folder (--data PATH[:share])")
        for paths in (self.data, self.evaluate_on):
            self.sources(paths)
        for name in (
            "steering_size", "answer_tokens", "prompt_tokens", "answer_batch", "held_out_tokens", "batch_tokens", "block",
            "log_every", "save_every",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in (
            "rank", "temperature", "max_tokens", "positions", "warmup_steps", "weight_decay", "kl_weight",
            "ce_weight", "seed",
        ):  # fmt: skip
            require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        for name in ("epochs", "learning_rate", "max_grad_norm", "disk_gb"):
            require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        require(0 < self.holdout_fraction < 1, "holdout_fraction", "in (0, 1)", self.holdout_fraction)
        require(0 <= self.alpha <= 1, "alpha", "in [0, 1]", self.alpha)
        require(self.sequence_length >= 8, "sequence_length", "at least 8", self.sequence_length)
        require(self.kl_weight + self.ce_weight > 0, "kl_weight and ce_weight together", "above 0", 0)
        for name, choices in (
            ("form", FORMS), ("arm", ARMS), ("precision", ("fp32", "bf16")), ("states_dtype", STATES_DTYPES),
        ):  # fmt: skip
            _one_of(name, choices, getattr(self, name))
        if self.device_map is not None:
            _one_of("device_map", ("auto",), self.device_map)
            if self.device != "auto":
                raise ValueError("device_map chooses the devices: leave out device")
        for form in self.keep_for:
            _one_of("keep_for", FORMS, form)
        if self.steering_layers and self.form != "steered" and "steered" not in self.keep_for:
            raise ValueError("steering_layers belong to form steered: choose --form steered, or leave them out")
        if self.beside:
            if self.form != DRAFTED:
                raise ValueError(f"beside needs form low_rank, the one that drafts are made with, got {self.form!r}")
            self.checkpoint_folder()

    @staticmethod
    def sources(paths: tuple[str, ...]) -> list[DataSource]:
        return [parse_data_source(text) for text in paths]

    @property
    def states_folder(self) -> Path:
        """Where the hidden states lie, or will."""
        return Path(self.states_of or self.output_dir) / "states"

    def checkpoint_folder(self) -> Path:
        """The folder that `beside` copies into. ValueError for a model that is in none."""
        folder = None if self.model is None else Path(resolve_checkpoint(self.model))
        if folder is None or not folder.is_dir():
            raise ValueError(
                "beside needs a checkpoint in a folder of its own: leave it out, and name the finished exits folder instead"
            )
        return folder

    def layers(self, model: LayerSkipModel) -> tuple[int, ...]:
        """The exits, ascending. ValueError for one that the model does not have."""
        chosen = self.exit_layers or default_exit_layers(model.num_layers)
        _check_layers("exit_layers", chosen, model.num_layers - 1, model.num_layers)
        return tuple(sorted(set(chosen)))

    def steering(self, model: LayerSkipModel) -> tuple[int, ...]:
        """The depths that steer, ascending, for form steered."""
        count = model.num_layers
        chosen = self.steering_layers or tuple(min(max(layer, 1), count) for layer in (3, count // 2, count - 2))
        _check_layers("steering_layers", chosen, count, count)
        return tuple(sorted(set(chosen)))

    def width(self, model: LayerSkipModel) -> int:
        """The adapters' rank."""
        return self.rank or default_rank(model)


OPERATIONAL_FIELDS = ("output_dir", "device", "device_map", "log_every", "save_every", "beside", "answer_batch")
"""What may differ when a run is taken up again."""
DATA_FIELDS = (
    "data", "exclude", "evaluate_on", "holdout_fraction", "chat_template", "own_answers", "answer_tokens", "prompt_tokens",
    "temperature", "max_tokens", "held_out_tokens", "sequence_length", "disk_gb", "seed",
)  # fmt: skip
"""What decides which texts there are states of."""


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Up to four exits, evenly, in the first quarter of the layers: 1 to 4 of 16; 2, 4, 6 and 8 of 32."""
    quarter = max(num_layers // 4, 1)
    count = min(4, quarter)
    return tuple(sorted({round(quarter * number / count) for number in range(1, count + 1)}))


def default_rank(model: LayerSkipModel) -> int:
    """A quarter of the hidden size, or as much as a tenth of a layer's weights allows."""
    return max(min(model.hidden_size // 4, model.layer_weights // (10 * 3 * model.hidden_size)), 1)


def _one_of(name: str, choices: tuple[str, ...], value: str) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_layers(name: str, layers: tuple[int, ...], most: int, num_layers: int) -> None:
    for layer in layers:
        if not 1 <= layer <= most:
            raise ValueError(f"{name} must be in [1, {most}] for this {num_layers}-layer model, got {layer}")
