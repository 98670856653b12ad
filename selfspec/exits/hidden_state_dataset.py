"""Hidden states of a frozen model over texts: computed once, kept on disk within a budget, read piece by piece.

A shard holds some texts; it exists whole or not at all, so an interrupted run goes on with the first missing one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import MOST_ROWS, PromptPiece, prefill, read_pieces
from layerskip_models.text_files import write_text
from layerskip_models.training.saving import write_tensors
from selfspec.exits.sequences import UNSCORED, ExitSequence, join
from selfspec.exits.training_texts import TrainingText

_SHARD_BYTES = 64 << 20
_BYTES_BESIDE_STATES = 8  # of a row: its label and its position


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesPlan:
    """What is kept. depths: ascending layer numbers; the last is the model's number of layers. dtype: of the states."""

    depths: tuple[int, ...]
    dtype: torch.dtype

    def bytes_per_row(self, hidden_size: int) -> int:
        """On disk."""
        return len(self.depths) * hidden_size * self.dtype.itemsize + _BYTES_BESIDE_STATES

    def rows(self, text: TrainingText) -> Tensor:
        """int64 [n], ascending: the rows of a text that are kept, those that predict a token that counts."""
        return predicting(text).nonzero().flatten()


def predicting(text: TrainingText) -> Tensor:
    """bool [tokens - 1]: which rows predict a token that counts. The last row of a text predicts nothing in it."""
    found = torch.zeros(len(text.tokens) - 1, dtype=torch.bool)
    for first, end in text.scored:
        found[max(first - 1, 0) : max(end - 1, 0)] = True
    return found


def plan_for(exit_layers: Sequence[int], model: LayerSkipModel, dtype: torch.dtype) -> StatesPlan:
    """What adapters for these exits of a model need."""
    return StatesPlan(depths=(*sorted({*exit_layers}), model.num_layers), dtype=dtype)


def states_dtype(model: LayerSkipModel) -> torch.dtype:
    """The model's own where it has 16 bits, else float16: half the disk, and rounded less than bfloat16 would."""
    return model.dtype if model.dtype.itemsize == 2 else torch.float16


@torch.no_grad()
def capture(model: LayerSkipModel, texts: Sequence[TrainingText], plan: StatesPlan) -> list[ExitSequence]:
    """Run texts through the model, several in a pass, each with the attention of its own; the rows that the plan keeps.

    Raises ValueError for states that the plan's dtype does not hold.
    """
    sequences: list[ExitSequence] = []
    group: list[TrainingText] = []
    for text in texts:
        if group and sum(len(one.tokens) for one in group) + len(text.tokens) > MOST_ROWS:
            sequences += _capture(model, group, plan)
            group = []
        group.append(text)
    return sequences + (_capture(model, group, plan) if group else [])


def _capture(model: LayerSkipModel, texts: Sequence[TrainingText], plan: StatesPlan) -> list[ExitSequence]:
    kept = [plan.rows(text) for text in texts]
    shape = len(plan.depths), model.hidden_size
    found = [torch.empty(len(rows), *shape, dtype=plan.dtype) for rows in kept]
    pieces = []
    for text, rows, states in zip(texts, kept, found):
        tokens = torch.tensor(text.tokens, device=model.device)

        def watch(first: int, layers_done: int, hidden: Tensor, rows: Tensor = rows, states: Tensor = states) -> None:
            if layers_done in plan.depths:
                end = first + hidden.shape[0]
                begin, stop = torch.searchsorted(rows, torch.tensor([first, end])).tolist()
                chosen = hidden[(rows[begin:stop] - first).to(hidden.device)]
                states[begin:stop, plan.depths.index(layers_done)] = chosen.to("cpu", plan.dtype)

        pieces.append(PromptPiece(tokens, KVCache(model, len(text.tokens)), len(text.tokens), watch))
    if len(pieces) == 1:
        prefill(model, pieces[0].tokens, pieces[0].cache, capture=pieces[0].capture)
    else:
        read_pieces(model, pieces, model.num_layers)
    sequences = []
    for text, rows, states in zip(texts, kept, found):
        if not states.isfinite().all():
            raise ValueError(f"hidden states do not fit in {plan.dtype}: choose states_dtype float32")
        following = torch.tensor(text.tokens[1:])
        sequences.append(
            ExitSequence(
                states=states,
                labels=torch.where(predicting(text), following, UNSCORED)[rows],
                positions=rows,
                texts=torch.zeros_like(rows),
                own=torch.full((len(rows),), text.own),
            )
        )
    return sequences


def write_states(
    model: LayerSkipModel,
    texts: Iterator[TrainingText],
    plan: StatesPlan,
    folder: Path,
    *,
    most_tokens: int,
    most_bytes: float,
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Any]:
    """Keep the states of texts until there are most_tokens scored ones, or the next text would exceed most_bytes.

    A text that goes beyond most_tokens is kept whole. advance: called with the scored tokens so far. Returns, and writes to
    done.json, how many texts, rows, scored tokens and bytes there are, and why it ended: "data", "tokens" or "budget".
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / "done.json"
    if finished.exists():
        found: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
        return found
    tally = {"texts": 0, "rows": 0, "tokens": 0, "bytes": 0}
    per_row = plan.bytes_per_row(model.hidden_size)
    shards = sorted(folder.glob("shard-*.safetensors"))
    written = sum(_metadata(path)["texts"] for path in shards)
    waiting: list[TrainingText] = []
    number, waiting_bytes, ended = len(shards), 0, "data"
    for text in texts:
        if text.num_scored == 0:
            continue
        size = len(plan.rows(text)) * per_row
        if tally["bytes"] + size > most_bytes:
            ended = "budget"
            break
        tally["texts"] += 1
        tally["rows"] += len(plan.rows(text))
        tally["tokens"] += text.num_scored
        tally["bytes"] += size
        if tally["texts"] > written:  # else it is in a shard of an earlier run
            waiting.append(text)
            waiting_bytes += size
            if waiting_bytes >= _SHARD_BYTES:
                _write_shard(capture(model, waiting, plan), folder / f"shard-{number:05d}.safetensors")
                number, waiting, waiting_bytes = number + 1, [], 0
        advance(tally["tokens"])
        if most_tokens and tally["tokens"] >= most_tokens:
            ended = "tokens"
            break
    if waiting:
        _write_shard(capture(model, waiting, plan), folder / f"shard-{number:05d}.safetensors")
    result = {**tally, "ended": ended}
    write_text(finished, json.dumps(result) + "\n")
    return result


def _write_shard(sequences: Sequence[ExitSequence], path: Path) -> None:
    tensors = {
        "states": torch.cat([one.states for one in sequences]),
        "labels": torch.cat([one.labels for one in sequences]).to(torch.int32),
        "positions": torch.cat([one.positions for one in sequences]).to(torch.int32),
        "rows": torch.tensor([len(one) for one in sequences]),
        "own": torch.tensor([bool(one.own[0]) for one in sequences]),
    }
    write_tensors(path, tensors, {"texts": str(len(sequences))})


def _metadata(path: Path) -> dict[str, int]:
    with safe_open(path, "pt") as shard:
        return {name: int(value) for name, value in shard.metadata().items()}


class HiddenStateDataset(Sequence[ExitSequence]):
    """What `write_states` left in a folder, as sequences of about `length` rows, of texts in an order that `seed` decides.

    Only what is asked for is read. depths: those that are wanted, of the plan's.
    """

    def __init__(self, folder: Path, plan: StatesPlan, depths: Sequence[int], *, length: int, seed: int) -> None:
        self._shards = [safe_open(path, "pt") for path in sorted(folder.glob("shard-*.safetensors"))]
        self._columns = [plan.depths.index(depth) for depth in depths]
        self._all_columns = len(self._columns) == len(plan.depths)
        self._rows = [shard.get_tensor("rows") for shard in self._shards]
        self._own = [shard.get_tensor("own") for shard in self._shards]
        self._labels = [shard.get_tensor("labels").long() for shard in self._shards]
        self._positions = [shard.get_tensor("positions").long() for shard in self._shards]
        firsts = [rows.cumsum(0) - rows for rows in self._rows]
        places = [(shard, text) for shard, rows in enumerate(self._rows) for text in range(len(rows))]
        self._places: list[list[tuple[int, int, int, bool]]] = []  # of each sequence: shard, first row, end, own
        held = length
        for index in np.random.default_rng(seed).permutation(len(places)).tolist():
            shard, text = places[index]
            first, rows = int(firsts[shard][text]), int(self._rows[shard][text])
            if held + rows > length:
                self._places.append([])
                held = 0
            self._places[-1].append((shard, first, first + rows, bool(self._own[shard][text])))
            held += rows

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        parts = []
        for shard, first, end, own in self._places[index]:
            states = self._shards[shard].get_slice("states")[first:end]
            positions = self._positions[shard][first:end]
            parts.append(
                ExitSequence(
                    states=states if self._all_columns else states[:, self._columns],
                    labels=self._labels[shard][first:end],
                    positions=positions,
                    texts=torch.zeros_like(positions),
                    own=torch.full_like(positions, own, dtype=torch.bool),
                )
            )
        return join(parts)
