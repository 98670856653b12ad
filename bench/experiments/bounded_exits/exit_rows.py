"""The token that each exit would draft at a position of a text or of a draft, and its confidence at several temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from layerskip_models.prefill import prefill
from selfspec.pacer.drafts import num_matching


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRow:
    """One row's choices. tokens: by exit layer, 1 first. confidences: by alpha, then by exit layer."""

    tokens: tuple[int, ...]
    confidences: dict[float, tuple[float, ...]]


class ExitRows:
    """What the exits up to `depth` predict along a text, and along drafts that depart from it. No draft is run twice.

    text: int64 [n], prompt and new tokens. first: the position of the first row that anybody asks for. alphas: of the
    temperatures 1 + alpha (1 - l / L) of exit l of L layers (SpecBound, "annealed confidence threshold").
    """

    def __init__(self, model: LayerSkipModel, text: Tensor, first: int, depth: int, alphas: Sequence[float]) -> None:
        self._model, self._first, self._depth, self._alphas = model, first, depth, tuple(alphas)
        self._tokens = text.tolist()
        self._drafts: dict[tuple[int, tuple[int, ...]], ExitRow] = {}
        self._cache, self._copy = KVCache(model, text.numel()), KVCache(model, text.numel())
        states: list[list[Tensor]] = [[] for _ in range(depth)]

        def capture(start: int, layers_done: int, hidden: Tensor) -> None:
            states[layers_done - 1].append(hidden[max(first - start, 0) :].clone())

        with torch.inference_mode():
            prefill(model, text, self._cache, stop=depth, capture=capture)
            self._rows = self._choose([torch.cat(parts) for parts in states])

    def row(self, committed: int, drafted: Sequence[int]) -> ExitRow:
        """Predictions after the first `committed` tokens of the text and then these drafted ones."""
        matching = num_matching(drafted, self._tokens[committed:])
        committed, drafted = committed + matching, tuple(drafted[matching:])
        if not drafted:
            return self._rows[committed - 1 - self._first]
        if (committed, drafted) not in self._drafts:
            self._drafts[committed, drafted] = self._run(committed, drafted)
        return self._drafts[committed, drafted]

    def _run(self, committed: int, drafted: Sequence[int]) -> ExitRow:
        last: list[Tensor] = []

        def capture(layers_done: int, hidden: Tensor) -> None:
            last.append(hidden[-1:].clone())

        with torch.inference_mode():
            self._copy.take(self._cache, committed)
            tokens = torch.tensor(drafted, device=self._model.device)
            self._model.run_layers(self._model.embed(tokens), 0, self._depth, self._copy, capture)
            return self._choose(last)[0]

    def _choose(self, states: Sequence[Tensor]) -> list[ExitRow]:
        """states: after each layer, [rows, hidden]."""
        model = self._model
        tokens: list[list[int]] = []
        sure: dict[float, list[list[float]]] = {alpha: [] for alpha in self._alphas}
        for layer, hidden in enumerate(states, start=1):
            logits = model.draft_logits(model.at_exit(hidden, layer))
            tokens.append(logits.argmax(dim=-1).tolist())
            for alpha in self._alphas:
                temperature = 1 + alpha * (1 - layer / model.num_layers)
                sure[alpha].append((logits / temperature).softmax(dim=-1).amax(dim=-1).tolist())
        by_row = {alpha: list(zip(*found)) for alpha, found in sure.items()}
        return [
            ExitRow(tokens=found, confidences={alpha: by_row[alpha][row] for alpha in self._alphas})
            for row, found in enumerate(zip(*tokens))
        ]
