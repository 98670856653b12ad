"""A stream of a model's own answers: what its exits would draft with adapters that stay, and with adapters that learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapters
from selfspec.analysis.replay import GRID_LENGTHS, AgreementTrace, replay
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import capture, plan_for
from selfspec.exits.learning import ExitLearner
from selfspec.exits.sequences import ExitSequence
from selfspec.exits.training_texts import TrainingText

ARMS = ("static", "learning")


def with_exits_only(adapters: ExitAdapters, exit_layers: Sequence[int]) -> ExitAdapters:
    """The adapters of some exits. Raises ValueError for an exit that has none."""
    missing = [layer for layer in exit_layers if layer not in adapters.exit_layers]
    if missing:
        held = ", ".join(map(str, adapters.exit_layers))
        raise ValueError(f"there is no adapter for exit {missing[0]}: choose from {held}")
    found = ExitAdapters(replace(adapters.config, exit_layers=tuple(sorted({*exit_layers}))))
    for layer in found.exit_layers:
        found.at(layer).load_state_dict(adapters.at(layer).state_dict())
    return found.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineStream:
    """Answers in their order, some at a time: judged with both kinds of adapters first, learned from only then.

    The states are those of one pass over each answer, which are those of verification; the rounds are replayed.
    """

    model: LayerSkipModel
    head: FrozenHead
    static: ExitAdapters
    learner: ExitLearner

    def blocks(self, texts: Iterable[TrainingText], size: int) -> Iterator[dict[str, Any]]:
        """A line for each `size` answers. texts: with their answer as the only scored span."""
        coming, done = iter(texts), 0
        while block := [*islice(coming, size)]:
            plan = plan_for(self.static.exit_layers, self.model, torch.float32)
            sequences = capture(self.model, block, plan)
            yield {
                "kind": "block",
                "first": done,
                "answers": len(block),
                "tokens": sum(text.num_scored for text in block),
                "exits": [*self._judged(sequences)],
                "learned": self._learn(block, sequences),
            }
            done += len(block)

    @torch.no_grad()
    def _judged(self, sequences: Sequence[ExitSequence]) -> Iterator[dict[str, Any]]:
        for depth, layer in enumerate(self.static.exit_layers):
            for arm, adapters in zip(ARMS, (self.static, self.learner.current)):
                # The first row predicts the token that reading the prompt gives.
                hits = [self._hits(adapters, layer, one.states[1:, depth], one.labels[1:]) for one in sequences]
                traces = [
                    AgreementTrace(
                        tokens=tuple(one.labels.tolist()),
                        agrees={layer: tuple(found.float().tolist())},
                        num_layers=self.model.num_layers,
                    )
                    for one, found in zip(sequences, hits)
                ]
                rounds = {length: [replay(trace, layer, length) for trace in traces] for length in GRID_LENGTHS}
                yield {
                    "exit_layer": layer,
                    "arm": arm,
                    "rows": sum(map(len, hits)),
                    "agreeing": sum(int(found.sum()) for found in hits),
                    "new_tokens": {str(length): sum(one.num_tokens for one in of) for length, of in rounds.items()},
                    "loaded_layers": {
                        str(length): sum(one.loaded_layers for one in of) for length, of in rounds.items()
                    },
                }

    def _hits(self, adapters: ExitAdapters, layer: int, states: Tensor, labels: Tensor) -> Tensor:
        """bool [n]: where the exit's likeliest token is the answer's next one."""
        adapted = adapters.at(layer)(states)
        parts = [self.head.logits(adapted[chunk]).argmax(dim=-1) for chunk in self.head.chunks(len(labels))]
        return torch.cat(parts) == labels if parts else torch.zeros(0, dtype=torch.bool)

    def _learn(self, block: Sequence[TrainingText], sequences: Sequence[ExitSequence]) -> dict[str, Any]:
        online = self.learner.online
        for text, sequence in zip(block, sequences):
            ((first, _),) = text.scored
            rows = online.begin_text(torch.tensor(text.tokens[:first]))
            rows.add_states([*sequence.states[1:].unbind(1)], sequence.labels[1:].tolist())
        report = self.learner.learn()
        return {name: getattr(report, name) for name in ("rows", "held_out", "steps", "judged", "replaced", "returned")}
