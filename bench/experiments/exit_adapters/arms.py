"""The study behind docs/exit-adapters.md: adapters of every form trained on one model's states, and what each is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.engines.own import GREEDY
from bench.experiments.exit_adapters.forms import (
    LENGTHS,
    Agreement,
    accepted_from_all_rows,
    adapter_layers,
    agreements,
    best_length,
    gain_of_rounds,
    own_texts,
)
from bench.experiments.exit_adapters.other_forms import (
    FORMS,
    LayerAdapters,
    make_adapters,
    plan_for_forms,
    training_outputs,
)
from bench.experiments.exit_adapters.position_weights import other_weights, parse_weighting
from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import config_for
from layerskip_models.exits.lean import lean_adapters
from policies import RoundRecord
from selfspec import SelfSpecGenerator
from selfspec.exits.fitting import fit
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import HiddenStateDataset, capture, states_dtype, write_states
from selfspec.exits.sequences import ExitSequence
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import training_texts

BY_LAYERS = "auto:cost=layers,copy=off"
"""The policy whose tokens per layer are counted. Copied tokens would hide what exits are worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What is trained: a form, with a weighting of positions."""

    form: str
    weighting: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.form}-{self.weighting}-{self.seed}"


def arms(forms: Sequence[str], weightings: Sequence[str], seeds: int) -> list[Arm]:
    """Every combination. ValueError for a form or a weighting that there is not."""
    if unknown := set(forms) - set(FORMS):
        raise ValueError(f"forms are {', '.join(FORMS)}; got {', '.join(sorted(unknown))}")
    names = [parse_weighting(weighting).name for weighting in weightings]
    return [Arm(form=form, weighting=name, seed=seed) for form, name, seed in product(forms, names, range(seeds))]


def train_arms(
    chosen: Sequence[Arm],
    work: Path,
    config: ExitTraining,
    generator: SelfSpecGenerator,
    advance: Callable[[str], None],
) -> dict[Arm, ExitAdapters]:
    """Fit each arm to the same hidden states, or read it from the work folder. The states lie there, too."""
    model = generator.model
    described = config_for(model, exit_layers=config.layers(model), rank=config.width(model))
    found: dict[Arm, ExitAdapters] = {}
    for arm in chosen:
        torch.manual_seed(arm.seed)
        found[arm] = make_adapters(arm.form, described, model)
    plan = plan_for_forms([*found.values()], model, states_dtype(model))
    texts = training_texts(config, generator, held_out=False, show=lambda label, done: None)
    folder = work / "states" / "train"
    write_states(model, texts, plan, folder, most_tokens=config.max_tokens, most_bytes=config.disk_gb * 1e9)
    advance("hidden states")
    head = FrozenHead(model)
    for arm, adapters in found.items():
        finished = work / f"{arm.name}.pt"
        if finished.exists():
            adapters.load_state_dict(torch.load(finished, weights_only=True))
        else:
            states = HiddenStateDataset(folder, plan, plan.depths, length=config.sequence_length, seed=arm.seed)
            weighting = parse_weighting(arm.weighting)
            weights = other_weights(weighting, head, plan.depths)
            settings = replace(
                config.fit_settings(len(states)),
                arm="uniform" if weights else weighting.arm,
                alpha=weighting.alpha,
                block=weighting.block,
                seed=arm.seed,
            )
            outputs = training_outputs(adapters, plan.depths)
            fit(adapters, states, plan.depths, head, settings, outputs=outputs, weights=weights)
            write_file(finished, adapters)
        adapters.eval()
        advance(f"training {arm.name}")
    return found


def write_file(path: Path, adapters: ExitAdapters) -> None:
    """Write the weights, whole or not at all."""
    temporary = path.with_suffix(".writing")
    torch.save(adapters.state_dict(), temporary)
    temporary.replace(path)


@dataclass(slots=True)
class Measured:
    """One model with the text it wrote, on which all arms are judged."""

    generator: SelfSpecGenerator
    prompts: Sequence[Tensor]
    max_new_tokens: int
    sequences: list[ExitSequence]
    depths: list[int]
    head: FrozenHead

    @classmethod
    def of(
        cls, model: LayerSkipModel, trained: Sequence[ExitAdapters], prompts: Sequence[Tensor], max_new_tokens: int
    ) -> Measured:
        generator = SelfSpecGenerator(model, prefix_cache=0)
        texts = own_texts(generator, prompts, max_new_tokens)
        plan = plan_for_forms(trained, model, torch.float32)
        return cls(generator, prompts, max_new_tokens, capture(model, texts, plan), [*plan.depths], FrozenHead(model))

    @property
    def model(self) -> LayerSkipModel:
        return self.generator.model

    def bare(self, layers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Lines of the exits as they are."""
        yield from self._lines(None, agreements(None, layers, self.sequences, self.depths, self.head))

    def arm(self, arm: Arm, adapters: ExitAdapters) -> Iterator[dict[str, Any]]:
        """Lines of one arm."""
        found = agreements(adapters, adapters.config.exit_layers, self.sequences, self.depths, self.head)
        for line in self._lines(adapters, found):
            yield {**line, "form": arm.form, "weighting": arm.weighting, "seed": arm.seed}

    def _lines(self, adapters: ExitAdapters | None, found: Sequence[Agreement]) -> Iterator[dict[str, Any]]:
        share = 0.0 if adapters is None else adapter_layers(adapters, self.model)
        lengths = {}
        for agreement in found:
            length, gain = best_length(agreement, self.model.num_layers, share)
            lengths[agreement.exit_layer] = length
            yield {
                "kind": "exit", "exit_layer": agreement.exit_layer, "agreement": agreement.share, "num_speculations": length,
                "gain": gain, "adapter_layers": share, "accepted": accepted_from_all_rows(agreement, max(LENGTHS)),
            }  # fmt: skip
        if not isinstance(adapters, LayerAdapters):  # a form that the engine drafts with
            leans = {} if adapters is None else lean_adapters(adapters, self.model)
            generator = SelfSpecGenerator(self.model.with_adapters(leans), prefix_cache=0)
            yield {
                "kind": "auto",
                "gain": self._by_layers(generator, dict.fromkeys(leans, share)),
                "adapter_layers": share,
            }

    def _by_layers(self, generator: SelfSpecGenerator, shares: dict[int, float]) -> float:
        """Of `BY_LAYERS`, which keeps what it learns from prompt to prompt."""
        rounds: list[RoundRecord] = []
        for prompt in self.prompts:
            result = generator.generate(
                prompt, max_new_tokens=self.max_new_tokens, policy=BY_LAYERS, trace=True, **GREEDY
            )
            assert result.trace is not None
            rounds += result.trace
        return gain_of_rounds(rounds, self.model.num_layers, shares)

    def speeds(
        self, adapters: ExitAdapters, layers: dict[int, tuple[int, int]], repeats: int
    ) -> Iterator[dict[str, Any]]:
        """Tokens per second, plain, bare and adapted taking turns prompt by prompt; a line for each policy.

        layers: by exit layer the lengths that are best bare and adapted.
        """
        generators = {
            "bare": SelfSpecGenerator(self.model.with_adapters({}), prefix_cache=0),
            "adapted": SelfSpecGenerator(self.model.with_adapters(lean_adapters(adapters, self.model)), prefix_cache=0),
        }
        runs = [("bare", "ar", "ar")]
        for layer, (bare, adapted) in layers.items():
            runs += [
                ("bare", f"exit {layer}", f"ls:{layer}-{bare}"),
                ("adapted", f"exit {layer}", f"ls:{layer}-{adapted}"),
            ]
        runs += [(which, "auto", "auto:copy=off") for which in generators]
        seconds: dict[tuple[str, str], list[float]] = {run[:2]: [] for run in runs}
        for repeat in range(repeats + 1):
            taken = dict.fromkeys(seconds, 0.0)
            for prompt in self.prompts:
                texts = set()
                for which, name, policy in runs:
                    result = generators[which].generate(
                        prompt, max_new_tokens=self.max_new_tokens, policy=policy, **GREEDY
                    )
                    taken[which, name] += result.stats.seconds - result.stats.time_to_first_token
                    texts.add(tuple(result.new_tokens))
                assert len(texts) == 1, "adapters changed the text"
            if repeat:  # the first one warms up, and teaches auto
                for run, total in taken.items():
                    seconds[run].append(total)
        plain = median(seconds["bare", "ar"])
        tokens = len(self.prompts) * (self.max_new_tokens - 1)
        for (which, name), times in seconds.items():
            yield {
                "kind": "speed", "exits": which, "name": name, "tokens_per_second": tokens / median(times),
                "over_plain": plain / median(times), "seconds": times,
            }  # fmt: skip
