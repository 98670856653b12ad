"""Hidden states of a frozen model over texts: computed once, kept on disk within a budget, read piece by piece.

A shard holds some texts. It exists whole or not at all, so an interrupted run goes on with the first missing one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.exits.steering import FARTHEST
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import MAX_ROWS, PromptPiece, prefill, read_pieces
from layerskip_models.text_files import write_text
from layerskip_models.training.saving import write_tensors
from selfspec.exits.training_texts import TrainingText

_SHARD_BYTES = 64 << 20
_OTHER_BYTES = 8  # of a row: its label and its position
_STRIDE = 1 << 32
UNSCORED = -1


@dataclass(frozen=True, slots=True, eq=False)
class ExitSequence:
    """Rows of one text or of several, in order; rows that nobody needs may be left out.

    states: [rows, depths, hidden]. labels: int64 [rows], the text's next token, or UNSCORED where no loss is taken.
    positions: int64 [rows], in the row's own text. texts: int64 [rows], ascending: the number of the row's text.
    own: bool [rows], True where the model wrote the text itself.
    """

    states: Tensor
    labels: Tensor
    positions: Tensor
    texts: Tensor
    own: Tensor

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def scored(self) -> Tensor:
        """bool [rows]."""
        return self.labels != UNSCORED

    def scored_rows(self) -> Tensor:
        """int64 [n], ascending."""
        return self.scored.nonzero().flatten()

    def keys(self) -> Tensor:
        """int64 [rows], ascending: text and position as one number. Neighbouring tokens of a text differ by 1."""
        return self.texts * _STRIDE + self.positions

    def runs(self, rows: Tensor) -> Tensor:
        """int64 [n]: numbers, from 0, of the stretches without gaps that these rows (int64 [n], ascending) form."""
        keys = self.keys()[rows]
        return torch.cat([keys.new_zeros(1), (keys.diff() != 1).long()])[: len(rows)].cumsum(0)

    def to(self, device: torch.device) -> ExitSequence:
        return ExitSequence(*(getattr(self, name).to(device) for name in ExitSequence.__slots__))


def join(parts: Sequence[ExitSequence]) -> ExitSequence:
    """Several sequences as one; their texts stay apart."""
    texts, first = [], 0
    for part in parts:
        texts.append(part.texts - part.texts[0] + first)
        first = int(texts[-1][-1]) + 1
    return ExitSequence(
        states=torch.cat([part.states for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        texts=torch.cat(texts),
        own=torch.cat([part.own for part in parts]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesPlan:
    """What is kept. depths: ascending layer numbers; the last is the model's number of layers. dtype: of the states.

    rows_before: how many rows are kept before each one that predicts a token that counts: those that may steer it.
    """

    depths: tuple[int, ...]
    dtype: torch.dtype
    rows_before: int = 0

    def bytes_per_row(self, hidden_size: int) -> int:
        """On disk."""
        return len(self.depths) * hidden_size * self.dtype.itemsize + _OTHER_BYTES

    def rows(self, text: TrainingText) -> Tensor:
        """int64 [n], ascending: the rows of a text that are kept, those that predict a token that counts and some before."""
        kept = predicting(text)
        for first, _ in text.scored if self.rows_before else ():
            kept[max(first - 1 - self.rows_before, 0) : max(first - 1, 0)] = True
        return kept.nonzero().flatten()


def predicting(text: TrainingText) -> Tensor:
    """bool [tokens - 1]: which rows predict a token that counts. The last row of a text predicts nothing in it."""
    found = torch.zeros(len(text.tokens) - 1, dtype=torch.bool)
    for first, end in text.scored:
        found[max(first - 1, 0) : max(end - 1, 0)] = True
    return found


def plan_for(
    exit_layers: Sequence[int], model: LayerSkipModel, dtype: torch.dtype, steering_layers: Sequence[int] = ()
) -> StatesPlan:
    """Plan what adapters for these exits need. steering_layers: of steered ones, whose states are needed, too."""
    depths = tuple(sorted({*exit_layers, *steering_layers, model.num_layers}))
    return StatesPlan(depths=depths, dtype=dtype, rows_before=FARTHEST if steering_layers else 0)


def states_dtype(model: LayerSkipModel) -> torch.dtype:
    """Take the model's own dtype if it has 16 bits, else float16: half the disk, and rounded less than bfloat16."""
    return model.dtype if model.dtype.itemsize == 2 else torch.float16


@torch.no_grad()
def capture(model: LayerSkipModel, texts: Sequence[TrainingText], plan: StatesPlan) -> list[ExitSequence]:
    """Run texts through the model, several in a pass, each with attention of its own; the rows that the plan keeps.

    Raises ValueError for states that the plan's dtype does not hold.
    """
    sequences: list[ExitSequence] = []
    group: list[TrainingText] = []
    for text in texts:
        if group and sum(len(one.tokens) for one in group) + len(text.tokens) > MAX_ROWS:
            sequences += _capture_together(model, group, plan)
            group = []
        group.append(text)
    return sequences + (_capture_together(model, group, plan) if group else [])


def _capture_together(model: LayerSkipModel, texts: Sequence[TrainingText], plan: StatesPlan) -> list[ExitSequence]:
    sequences, pieces = [], []
    for text in texts:
        rows = plan.rows(text)
        states = torch.empty(len(rows), len(plan.depths), model.hidden_size, dtype=plan.dtype)
        labels = torch.where(predicting(text), torch.tensor(text.tokens[1:]), UNSCORED)[rows]
        own = torch.full((len(rows),), text.own)
        sequences.append(ExitSequence(states, labels, rows, torch.zeros_like(rows), own))

        def watch(first: int, layers_done: int, hidden: Tensor, rows: Tensor = rows, states: Tensor = states) -> None:
            if layers_done in plan.depths:
                begin, stop = torch.searchsorted(rows, torch.tensor([first, first + hidden.shape[0]])).tolist()
                chosen = hidden[(rows[begin:stop] - first).to(hidden.device)]
                states[begin:stop, plan.depths.index(layers_done)] = chosen.to("cpu", plan.dtype)

        tokens = torch.tensor(text.tokens, device=model.device)
        pieces.append(PromptPiece(tokens, KVCache(model, len(text.tokens)), len(text.tokens), watch))
    if len(pieces) == 1:
        prefill(model, pieces[0].tokens, pieces[0].cache, capture=pieces[0].capture)
    else:
        read_pieces(model, pieces, model.num_layers)
    if not all(sequence.states.isfinite().all() for sequence in sequences):
        raise ValueError(f"hidden states do not fit in {plan.dtype}: choose states_dtype float32")
    return sequences


def write_states(
    model: LayerSkipModel,
    texts: Iterator[TrainingText],
    plan: StatesPlan,
    folder: Path,
    *,
    max_tokens: int,
    max_bytes: float,
    advance: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Any]:
    """Keep the states of texts until there are max_tokens scored ones, or the next text would exceed max_bytes.

    A text that goes beyond max_tokens is kept whole. advance: called with the scored tokens so far. Returns, and writes to
    done.json, how many texts, rows, scored tokens and bytes there are, and why it ended: "data", "tokens" or "budget".
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / "done.json"
    if finished.exists():
        found: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
        return found
    shards = sorted(folder.glob("shard-*.safetensors"))
    written = sum(len(_open(path).get_tensor("rows")) for path in shards)  # texts, by an earlier run
    waiting: list[TrainingText] = []
    waiting_bytes = 0
    tally, ended = Counter(texts=0, rows=0, tokens=0, bytes=0), "data"
    for text in texts:
        if text.num_scored == 0:
            continue
        rows = len(plan.rows(text))
        size = rows * plan.bytes_per_row(model.hidden_size)
        if tally["bytes"] + size > max_bytes:
            ended = "budget"
            break
        tally.update(texts=1, rows=rows, tokens=text.num_scored, bytes=size)
        if tally["texts"] > written:
            waiting.append(text)
            waiting_bytes += size
            if waiting_bytes >= _SHARD_BYTES:
                shards.append(_write_shard(capture(model, waiting, plan), folder, len(shards)))
                waiting, waiting_bytes = [], 0
        advance(tally["tokens"])
        if max_tokens and tally["tokens"] >= max_tokens:
            ended = "tokens"
            break
    if waiting:
        _write_shard(capture(model, waiting, plan), folder, len(shards))
    result = {**tally, "ended": ended}
    write_text(finished, json.dumps(result) + "\n")
    return result


def _open(path: Path) -> Any:
    return safe_open(path, "pt")


def _write_shard(sequences: Sequence[ExitSequence], folder: Path, number: int) -> Path:
    path = folder / f"shard-{number:05d}.safetensors"
    tensors = {
        "states": torch.cat([one.states for one in sequences]),
        "labels": torch.cat([one.labels for one in sequences]).to(torch.int32),
        "positions": torch.cat([one.positions for one in sequences]).to(torch.int32),
        "rows": torch.tensor([len(one) for one in sequences]),
        "own": torch.tensor([bool(one.own[0]) for one in sequences]),
    }
    write_tensors(path, tensors)
    return path


class HiddenStateDataset(Sequence[ExitSequence]):
    """The states in a folder that `write_states` filled, as sequences of about `length` rows. Read when asked for.

    depths: the wanted ones of the plan's. seed: decides the order of the texts.
    """

    def __init__(self, folder: Path, plan: StatesPlan, depths: Sequence[int], *, length: int, seed: int) -> None:
        self._shards = [_open(path) for path in sorted(folder.glob("shard-*.safetensors"))]
        self._columns = [plan.depths.index(depth) for depth in depths]
        self._all_columns = len(self._columns) == len(plan.depths)
        self._labels = [shard.get_tensor("labels").long() for shard in self._shards]
        self._positions = [shard.get_tensor("positions").long() for shard in self._shards]
        texts: list[tuple[int, int, int, bool]] = []  # of each: shard, first row, end, own
        for number, shard in enumerate(self._shards):
            rows, own = shard.get_tensor("rows"), shard.get_tensor("own")
            ends = rows.cumsum(0)
            texts += zip([number] * len(rows), (ends - rows).tolist(), ends.tolist(), own.tolist())
        self._sequences: list[list[tuple[int, int, int, bool]]] = []
        held = length
        for index in np.random.default_rng(seed).permutation(len(texts)).tolist():
            _, first, end, _ = texts[index]
            if held + end - first > length:
                self._sequences.append([])
                held = 0
            self._sequences[-1].append(texts[index])
            held += end - first

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: Any) -> Any:
        parts = []
        for shard, first, end, own in self._sequences[index]:
            states = self._shards[shard].get_slice("states")[first:end]
            states = states if self._all_columns else states[:, self._columns]
            positions = self._positions[shard][first:end]
            of_model = torch.full_like(positions, own, dtype=torch.bool)
            labels = self._labels[shard][first:end]
            parts.append(ExitSequence(states, labels, positions, torch.zeros_like(positions), of_model))
        return join(parts)
