"""ExitTraining: every option of `selfspec train-exit`, with its meaning and its check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from layerskip_models.checkpoints.named_models import DEMO
from layerskip_models.exits import FOLDER, FORMS, LOW_RANK, STEERED, STEERING_SIZE
from layerskip_models.training.settings import (
    AT_LEAST_0,
    AT_LEAST_1,
    FrozenModelSettings,
    Range,
    option,
    require,
    with_default,
)

if TYPE_CHECKING:
    from layerskip_models import LayerSkipModel


@dataclass(frozen=True, kw_only=True)
class ExitTraining(FrozenModelSettings):
    """One run, data and training. Checked on construction: ValueError says which field, its range, what to do."""

    model: str = option(DEMO, "The frozen checkpoint: hub name, folder or short name.", argument=True)
    data: tuple[str, ...] = option(
        (),
        "PATH[:share] of training data; repeatable. A .jsonl[.gz] file with messages, prompt and completion, "
        "prompt alone (for --own-answers) or text in each line; a .txt, .txt.gz or .py file; a folder of those.",
    )
    device_map: str | None = option(
        None, "auto: spread the frozen model over all GPUs of this machine, where one does not hold it (one process)."
    )
    exit_layers: tuple[int, ...] = option(
        (),
        "Exit to train an adapter for; repeatable (default: up to four, evenly, in the first quarter of the layers).",
    )
    form: str = option(
        LOW_RANK,
        "low_rank; or steered: drafts also see states of the row that was verified last (docs/training.md).",
        FORMS,
    )
    steering_size: int = option(
        0,
        f"Width of what steers, for --form steered; 0 for {STEERING_SIZE}. At the hidden size it begins as a sum of states.",
        AT_LEAST_0,
    )
    rank: int = option(
        0,
        "Width of the adapter; 0 for a quarter of the hidden size, with a tenth of a layer's weights at most.",
        AT_LEAST_0,
    )

    chat_template: str | None = option(None, '"plain" or a Jinja file, for messages (default: the tokenizer\'s own).')
    own_answers: bool = option(False, "Let the model write the answers itself, and train on those.")
    answer_tokens: int = option(192, "Maximum length of such an answer in tokens.", AT_LEAST_1)
    prompt_tokens: int = option(256, "Maximum length of their prompts; longer ones are cut to their end.", AT_LEAST_1)
    temperature: float = option(
        0.0, "Temperature of such answers, that of the texts to draft; 0 is greedy.", AT_LEAST_0
    )
    answer_batch: int = option(8, "Answers that are written at a time.", AT_LEAST_1)

    max_tokens: int = option(400_000, "Maximum number of training tokens; 0 for all that the data give.", AT_LEAST_0)
    held_out_tokens: int = option(20_000, "Maximum number of tokens to evaluate on.", AT_LEAST_1)
    sequence_length: int = option(
        512, "Maximum length of a text, longer ones are cut; short ones are packed to this length.", Range(8)
    )
    epochs: float = with_default(FrozenModelSettings, "epochs", 3.0)
    batch_tokens: int = option(2048, "Tokens per optimiser step, over all processes.", AT_LEAST_1)
    learning_rate: float = with_default(FrozenModelSettings, "learning_rate", 5e-3)
    kl_weight: float = option(1.0, "Weight of KL(model || exit).", AT_LEAST_0)
    ce_weight: float = option(0.1, "Weight of the cross-entropy on the model's own tokens.", AT_LEAST_0)

    d_pace: bool = option(
        False, "D-PACE's loss instead: cross-entropies weighted by accepted length; kl_weight and ce_weight do nothing."
    )

    operational: ClassVar[tuple[str, ...]] = (*FrozenModelSettings.operational, "device_map", "answer_batch")
    results: ClassVar[tuple[str, ...]] = ("answers-train.jsonl", "checkpoints", FOLDER)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.d_pace or self.kl_weight + self.ce_weight > 0, "kl_weight and ce_weight together", "above 0", 0)
        if self.device_map is not None:
            if self.device_map != "auto":
                raise ValueError(f"device_map must be auto, got {self.device_map!r}")
            if self.device != "auto":
                raise ValueError("device_map chooses the devices: leave out device")
        if self.steering_size and self.form != STEERED:
            raise ValueError(f"steering_size is of form {STEERED}: choose that form, or leave it out")

    def layers(self, model: LayerSkipModel) -> tuple[int, ...]:
        """List the exits, ascending: 1 to 4 of 16 by default; 2, 4, 6 and 8 of 32. ValueError without such a layer."""
        from policies.bounds import check_layers

        if self.exit_layers:
            return check_layers(self.exit_layers, model.num_layers)
        quarter = max(model.num_layers // 4, 1)
        count = min(4, quarter)
        return tuple(round(quarter * number / count) for number in range(1, count + 1))


def default_rank(model: LayerSkipModel) -> int:
    """Take a quarter of the hidden size, or as much as a tenth of a layer's weights allows."""
    return max(min(model.hidden_size // 4, model.layer_weights // (10 * 3 * model.hidden_size)), 1)
