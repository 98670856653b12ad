"""What studies share that choose settings on some prompts and score them on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.commands.preparation import configuration, open_model, open_tokenizer
from bench.commands.run_command import choose_prompts
from bench.datasets import EncodedPrompt, encode_prompts, split_for_tuning
from bench.provenance import provenance
from bench.record import Line
from layerskip_models import DEMO_PATH
from policies.bounds import check_exit_layer
from selfspec import SelfSpecGenerator

TuningOption = Annotated[int, typer.Option(min=1, help="Prompts of each task that settings are chosen on.")]
ScoredOption = Annotated[int, typer.Option(min=1, help="Prompts of each task that are scored, after these.")]
ExitLayersOption = Annotated[
    list[int] | None,
    typer.Option("--exit-layer", help="Exit layer to try for the rules that need one; repeatable. Default: 1, 2, 3."),
]
EXIT_LAYERS = (1, 2, 3)
"""What that option stands for where it is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRun:
    """A model on the CPU, and its prompts. tuning, scored: those of `samples` that settings are chosen on, and the others."""

    checkpoint: str
    generator: SelfSpecGenerator
    samples: Sequence[EncodedPrompt]
    tuning: Sequence[EncodedPrompt]
    scored: Sequence[EncodedPrompt]
    exit_layers: list[int]

    @classmethod
    def prepare(
        cls,
        model: str | None,
        dtype: str,
        prompts: Sequence[Path],
        tuning: int,
        num_samples: int,
        prompt_tokens: int,
        exit_layers: Sequence[int],
    ) -> TunedRun:
        """tuning, num_samples: prompts of each task, the first and those behind them.

        Raises ValueError for an exit layer that the model does not have, and where a task has too few prompts.
        """
        checkpoint = str(model or DEMO_PATH)
        chosen = choose_prompts(prompts, [], tuning + num_samples)
        samples = encode_prompts(chosen, open_tokenizer(checkpoint), prompt_tokens)
        first, others = split_for_tuning(samples, tuning)
        generator = SelfSpecGenerator(open_model(checkpoint, dtype, "cpu"), prefix_cache=0)
        layers = [check_exit_layer(layer, generator.model.num_layers) for layer in dict.fromkeys(exit_layers)]
        return cls(
            checkpoint=checkpoint,
            generator=generator,
            samples=samples,
            tuning=first,
            scored=others,
            exit_layers=layers,
        )

    def description(self, command: str, max_new_tokens: int, **more: Any) -> Line:
        """The first line of a record. more: of its configuration."""
        model = self.generator.model
        return {
            "kind": "run",
            "command": command,
            "configuration": {
                **configuration(self.checkpoint, self.samples, max_new_tokens, repeats=1, warmups=0),
                "tuning_prompts": [sample.id for sample in self.tuning],
                "num_layers": model.num_layers,
                "exit_layers": self.exit_layers,
                **more,
            },
            "engines": {},
            "provenance": provenance(model.device, model.dtype),
        }
