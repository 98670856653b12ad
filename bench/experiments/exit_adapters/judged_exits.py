"""What exits of a real model are worth on its answers to held-out questions, bare and with adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.experiments.exit_adapters.arms import BY_LAYERS
from bench.experiments.exit_adapters.draft_rows import (
    agreement_needed,
    best_replayed,
    coverage,
    head_seconds,
    least_of,
    likeliest,
    tokens_of,
    with_draft_head,
)
from bench.experiments.exit_adapters.forms import adapter_layers, gain_of_rounds
from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.lean import lean_adapters
from policies import CostModel, LayerCost, RoundRecord
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import AgreementTrace
from selfspec.engine.calibrate import calibrate
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import capture, plan_for
from selfspec.exits.training_texts import TrainingText

CALIBRATIONS = 8
"""How often costs are calibrated. The least of each time counts."""
WANTED = 1.1
"""Tokens per cost over plain decoding from which an exit is worth having."""


def answers_of(model: LayerSkipModel, prompts: Sequence[Tensor], max_new_tokens: int) -> list[list[int]]:
    """The model's own greedy continuations of prompts, int64 [n] each: the new tokens, ended by EOS or the limit."""
    generator = SelfSpecGenerator(model.with_adapters({}), prefix_cache=0)
    results = generator.generate_batch([*prompts], max_new_tokens=max_new_tokens, policy="ar", do_sample=False)
    return [result.new_tokens for result in results]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedExits:
    """A model, its adapters (None: bare exits only) and its greedy answers to some prompts, int64 [n] each.

    answers: the new tokens, ended by EOS or the limit.
    """

    model: LayerSkipModel
    adapters: ExitAdapters | None
    exit_layers: tuple[int, ...]
    prompts: Sequence[Tensor]
    answers: Sequence[Sequence[int]]
    max_new_tokens: int

    @classmethod
    def of(
        cls,
        model: LayerSkipModel,
        adapters: ExitAdapters | None,
        exit_layers: tuple[int, ...],
        prompts: Sequence[Tensor],
        max_new_tokens: int,
    ) -> JudgedExits:
        answers = answers_of(model, prompts, max_new_tokens)
        return cls(
            model=model.with_adapters({}), adapters=adapters, exit_layers=exit_layers, prompts=prompts, answers=answers,
            max_new_tokens=max_new_tokens,
        )  # fmt: skip

    @property
    def _kinds(self) -> dict[str, ExitAdapters | None]:
        return {"bare": None} if self.adapters is None else {"bare": None, "adapted": self.adapters}

    def _with(self, adapters: ExitAdapters | None) -> LayerSkipModel:
        return self.model.with_adapters({} if adapters is None else lean_adapters(adapters, self.model))

    def exits(self, sizes: Sequence[int], written: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
        """A line for each exit, bare and adapted, with each draft head; before them one for each head and for the costs.

        sizes: numbers of rows of draft heads, beside the whole head. written: answers whose likeliest tokens they are.
        """
        head = FrozenHead(self.model)
        rows = {head.vocab_size: torch.arange(head.vocab_size)}
        rows |= {size: likeliest(written, size, head.vocab_size) for size in sizes}
        seconds = dict(zip(rows, head_seconds(head, self.model, [*rows])))
        for size, tokens in rows.items():
            share = coverage(self.answers, tokens)
            yield {"kind": "head", "rows": size, "coverage": share, "seconds": seconds[size]}
        states = self._states()
        for which, adapters in self._kinds.items():
            model = self._with(adapters)
            cost = least_of([calibrate(model) for _ in range(CALIBRATIONS)])
            yield {"kind": "cost", "exits": which, **cost.as_dict()}
            drafting = self._drafting(states, adapters)
            for size, tokens in rows.items():
                prices = with_draft_head(cost, seconds[head.vocab_size], seconds[size])
                for line in self._lines(drafting, partial(tokens_of, head, rows=tokens), prices):
                    yield {"kind": "exit", "exits": which, "rows": size, **line}

    def _states(self) -> list[Tensor]:
        """For each answer the hidden states after the exits, [tokens - 1, exits, hidden]: at all its tokens but the last."""
        plan = plan_for(self.exit_layers, self.model, torch.float32)
        texts = [
            TrainingText([*prompt.tolist(), *answer], [(len(prompt) + 1, len(prompt) + len(answer))], own=True)
            for prompt, answer in zip(self.prompts, self.answers)
        ]
        return [sequence.states[:, :-1] for sequence in capture(self.model, texts, plan)]

    @torch.no_grad()
    def _drafting(self, states: Sequence[Tensor], adapters: ExitAdapters | None) -> dict[int, list[Tensor]]:
        """By exit layer what drafts are chosen from."""
        found = {layer: [one[:, place] for one in states] for place, layer in enumerate(self.exit_layers)}
        if adapters is None:
            return found
        return {layer: [adapters.at(layer)(one) for one in of_exit] for layer, of_exit in found.items()}

    def _lines(
        self, drafting: dict[int, list[Tensor]], choose: Callable[[Tensor], Tensor], cost: CostModel
    ) -> Iterator[dict[str, Any]]:
        for layer, states in drafting.items():
            hits = [
                choose(one) == torch.tensor(answer[1:], dtype=torch.long) for one, answer in zip(states, self.answers)
            ]
            traces = [
                AgreementTrace(
                    tokens=tuple(answer),
                    agrees={layer: tuple(found.float().tolist())},
                    num_layers=self.model.num_layers,
                )
                for answer, found in zip(self.answers, hits)
            ]
            best = best_replayed(traces, layer, cost)
            yield {
                "exit_layer": layer,
                "agreement": float(torch.cat(hits).float().mean()),
                **asdict(best),
                "gain_by_layers": best_replayed(traces, layer, LayerCost(num_layers=self.model.num_layers)).gain,
                "agreement_needed": agreement_needed(layer, cost, WANTED),
            }

    def auto_by_layers(self) -> Iterator[dict[str, Any]]:
        """Tokens per layer of `BY_LAYERS` over plain decoding's, for bare and adapted exits."""
        for which, adapters in self._kinds.items():
            generator = SelfSpecGenerator(self._with(adapters), prefix_cache=0)
            share = 0.0 if adapters is None else adapter_layers(adapters, self.model)
            rounds: list[RoundRecord] = []
            for prompt, answer in zip(self.prompts, self.answers):
                result = generator.generate(
                    prompt, max_new_tokens=self.max_new_tokens, policy=BY_LAYERS, do_sample=False, trace=True
                )
                assert result.new_tokens == [*answer], "drafts changed the text"
                rounds += result.trace or ()
            gain = gain_of_rounds(rounds, self.model.num_layers, dict.fromkeys(self.exit_layers, share))
            tokens = sum(len(record.tokens) for record in rounds) / max(len(rounds), 1)
            yield {"kind": "auto", "exits": which, "gain": gain, "tokens_per_round": tokens}

    def speeds(self, settings: dict[str, str], repeats: int) -> Iterator[dict[str, Any]]:
        """Tokens per second of plain decoding, `auto` and a fixed setting for each kind of exits, taking turns.

        settings: by kind, such as "bare", the fixed policy.
        """
        generators = {
            which: SelfSpecGenerator(self._with(adapters), prefix_cache=0) for which, adapters in self._kinds.items()
        }
        runs = [("bare", "ar")]
        runs += [(which, policy) for which in generators for policy in ("auto:copy=off", "auto", settings[which])]
        seconds: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
        for repeat in range(repeats + 1):
            taken = dict.fromkeys(runs, 0.0)
            for prompt, answer in zip(self.prompts, self.answers):
                for which, policy in runs:
                    result = generators[which].generate(
                        prompt, max_new_tokens=self.max_new_tokens, policy=policy, do_sample=False
                    )
                    assert result.new_tokens == [*answer], "drafts changed the text"
                    taken[which, policy] += result.stats.seconds - result.stats.time_to_first_token
            if repeat:  # the first one warms up, and teaches auto
                for run, total in taken.items():
                    seconds[run].append(total)
        tokens = sum(len(answer) - 1 for answer in self.answers)
        plain = median(seconds["bare", "ar"])
        for (which, policy), times in seconds.items():
            yield {
                "kind": "speed", "exits": which, "policy": policy, "tokens_per_second": tokens / median(times),
                "over_plain": plain / median(times), "seconds": times,
            }  # fmt: skip
