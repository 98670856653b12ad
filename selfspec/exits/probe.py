"""A few minutes of fitting, which show what adapters would gain on a model before anybody trains them.

It needs no data: the model samples continuations of a few sample texts, and drafts are for text of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import monotonic

import torch
from torch import Tensor

from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for
from selfspec.exits.fitting import FitSettings, StepFigures, fit
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import capture, plan_for, states_dtype
from selfspec.exits.sequences import join
from selfspec.exits.settings import default_exit_layers, default_rank
from selfspec.exits.training_texts import TrainingText
from selfspec.generator import SelfSpecGenerator

_WRITING = 0.35  # share of the time in which the model writes
_TEXTS = 8  # written at once
_NEW_TOKENS = 192
_LONGEST_PROMPT = 32
_STEPS = 100_000  # more than any time allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The fitted adapters, with the number of tokens that the model wrote and of optimiser steps."""

    adapters: ExitAdapters
    tokens: int
    steps: int


def probe_exits(
    generator: SelfSpecGenerator,
    texts: Sequence[Tensor],
    seconds: float,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda label: None,
) -> Probe:
    """Fit adapters at the default exits for about this long.

    texts: int64 [n] each; the model continues pieces of them. say: called now and then with what is being done.
    Raises ValueError unless seconds is positive.
    """
    if not seconds > 0:
        raise ValueError(f"a probe takes a positive time, got {seconds} s")
    started = monotonic()
    model = generator.model.with_adapters({})
    config = config_for(model, exit_layers=default_exit_layers(model.num_layers), rank=default_rank(model))
    random = Random(seed)
    written: list[TrainingText] = []
    writer = SelfSpecGenerator(model, runner=generator.runner, prefix_cache=0)
    while not written or monotonic() - started < _WRITING * seconds:
        written += _write(writer, texts, random)
        say(f"the model has written {sum(text.num_scored for text in written):,} tokens")
    plan = plan_for(config.exit_layers, model, states_dtype(model))
    sequences = [sequence for sequence in capture(model, written, plan) if bool(sequence.scored.any())]
    random.shuffle(sequences)
    batches = [join(sequences[first : first + 4]) for first in range(0, len(sequences), 4)]
    torch.manual_seed(seed)
    adapters = ExitAdapters(config).to(model.device)

    def after_step(done: int, figures: StepFigures) -> None:
        if done % 10 == 0:
            say(f"fitted {done} steps, KL {figures.mean_kl:.3f}")

    left = max(seconds - (monotonic() - started), 0.1 * seconds)
    steps = fit(
        adapters, batches, plan.depths, FrozenHead(model), FitSettings(steps=_STEPS, batch=1, seed=seed),
        seconds=left, after_step=after_step,
    )  # fmt: skip
    return Probe(adapters=adapters.eval(), tokens=sum(text.num_scored for text in written), steps=steps)


def _write(generator: SelfSpecGenerator, texts: Sequence[Tensor], random: Random) -> list[TrainingText]:
    """Sampled continuations of pieces of these texts."""
    longest = max(min(_LONGEST_PROMPT, generator.model.max_positions // 4), 1)
    new_tokens = max(min(_NEW_TOKENS, generator.model.max_positions - longest), 1)
    prompts = []
    for _ in range(_TEXTS):
        text = random.choice(texts)
        first = random.randrange(max(text.numel() - 1, 1))
        prompts.append(text[first : first + random.randint(1, longest)])
    results = generator.generate_batch(
        prompts, max_new_tokens=new_tokens, policy="ar", do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=[], seed=[random.randrange(1 << 31) for _ in prompts],
    )  # fmt: skip
    return [
        TrainingText(result.sequences[0].tolist(), [(prompt.numel() + 1, result.sequences.shape[1])], own=False)
        for prompt, result in zip(prompts, results)
    ]
