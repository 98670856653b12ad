"""A stream of a model's own answers: what its exits would draft with adapters that stay, and with adapters that learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.experiments.online_exits.answer_rows import AnswerRows
from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapters
from selfspec.analysis.replay import GRID_LENGTHS, AgreementTrace, replay
from selfspec.exits.learning import ExitLearner

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
    """Answers in their order, some at a time: judged with both kinds of adapters first, and learned from only then.

    The rounds of a setting are replayed on the answers, which drafts do not change.
    """

    model: LayerSkipModel
    static: ExitAdapters
    learner: ExitLearner

    def block(self, answers: Sequence[AnswerRows]) -> dict[str, Any]:
        """What some answers show, as a record's line."""
        return {
            "answers": len(answers),
            "tokens": sum(len(one.labels) + 1 for one in answers),
            "exits": [*self._judged(answers)],
            "learned": self._learn(answers),
        }

    @torch.no_grad()
    def _judged(self, answers: Sequence[AnswerRows]) -> Iterator[dict[str, Any]]:
        for depth, layer in enumerate(self.static.exit_layers):
            for arm, adapters in zip(ARMS, (self.static, self.learner.current)):
                hits = self._hits(adapters, layer, torch.cat([one.states[depth] for one in answers]).float())
                agrees = hits == torch.cat([one.labels for one in answers])
                traces = [
                    AgreementTrace(
                        tokens=(
                            0,
                            *one.labels.tolist(),
                        ),  # the first one, which reading the prompt gives, does not matter
                        agrees={layer: tuple(found.float().tolist())},
                        num_layers=self.model.num_layers,
                    )
                    for one, found in zip(answers, agrees.split([len(one.labels) for one in answers]))
                ]
                rounds = {length: [replay(trace, layer, length) for trace in traces] for length in GRID_LENGTHS}
                yield {
                    "exit_layer": layer,
                    "arm": arm,
                    "rows": len(agrees),
                    "agreeing": int(agrees.sum()),
                    "new_tokens": {str(length): sum(one.num_tokens for one in of) for length, of in rounds.items()},
                    "loaded_layers": {
                        str(length): sum(one.loaded_layers for one in of) for length, of in rounds.items()
                    },
                }

    def _hits(self, adapters: ExitAdapters, layer: int, states: Tensor) -> Tensor:
        """int64 [n]: what the exit would draft at each row. states: float32 [n, hidden]."""
        return self.model.draft_choices(adapters.at(layer)(states).to(self.model.dtype)).tokens

    def _learn(self, answers: Sequence[AnswerRows]) -> dict[str, Any]:
        for one in answers:
            rows = self.learner.online.begin_text(one.prompt)
            rows.add_states([*one.states.float()], one.labels.tolist())
        report = self.learner.learn()
        return {name: getattr(report, name) for name in ("rows", "held_out", "steps", "judged", "replaced", "returned")}
