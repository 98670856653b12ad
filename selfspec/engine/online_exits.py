"""What an engine does for exits that learn while it decodes: rows of verification go out, other adapters come in.

A round of verification has both an exit's hidden states and the token that the model then chose. `OnlineExits` keeps
a limited number of such rows, and lets new adapters in between two rounds. It neither learns nor judges: that is
`selfspec.exits.learning`. Only drafts see adapters, so whatever comes in, the text stays the model's own.

Source: DVI (arXiv 2510.05421), which trains a drafter on what verification has found anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.exits.lean import AdapterMatrices, LeanAdapter

HELD_OUT = 5
"""One of so many texts is kept for judging, and never learned from. Which one, its prompt decides."""
LEAST_ROWS = 64
"""Fewest rows that there must be memory for."""
_HASHED_TOKENS = 512
_OTHER_BYTES = 8  # of a row: its token


@dataclass(frozen=True, slots=True, eq=False)
class ExitRows:
    """Some rows. states: [depths, n, hidden], after each exit and after the last layer. tokens: int64 [n], which followed."""

    states: Tensor
    tokens: Tensor

    def __len__(self) -> int:
        return self.tokens.numel()


class RowRing:
    """The latest rows, of at most `capacity`; a later one takes the place of the oldest. Any thread may use it.

    Memory is allocated once, on `device`. Adding rows copies them and waits for nothing.
    """

    def __init__(self, depths: int, hidden_size: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._states = torch.empty(depths, capacity, hidden_size, dtype=dtype, device=device)
        self._tokens = np.zeros(capacity, dtype=np.int64)
        self._capacity = capacity
        self._lock = threading.Lock()
        self.seen = 0
        """Rows that were ever added."""

    def __len__(self) -> int:
        """Rows that are held."""
        return min(self.seen, self._capacity)

    def add(self, states: Sequence[Tensor], tokens: Sequence[int]) -> None:
        """states: [n, hidden] at each depth. tokens: the n that followed."""
        with self._lock:
            done = 0
            while done < len(tokens):
                first = self.seen % self._capacity
                count = min(len(tokens) - done, self._capacity - first)
                for kept, rows in zip(self._states, states):
                    kept[first : first + count] = rows[done : done + count]
                self._tokens[first : first + count] = tokens[done : done + count]
                self.seen += count
                done += count

    def drawn(self, count: int, draw: np.random.Generator) -> ExitRows:
        """So many rows at random, at most those that are held; a copy."""
        return self.at(draw.permutation(len(self))[:count])

    def tokens(self) -> np.ndarray:
        """The tokens that followed the rows that are held, each once, ascending."""
        with self._lock:
            held = self._tokens[: len(self)].copy()
        return np.unique(held)

    def at(self, places: np.ndarray) -> ExitRows:
        """The rows in these places of memory, each below len(self); a copy."""
        index = torch.from_numpy(places).to(self._states.device)
        with self._lock:
            return ExitRows(self._states[:, index], torch.from_numpy(self._tokens[places]))


class TextRows:
    """The rows of one text, of which the first `most` are kept. ring: where."""

    __slots__ = ("_left", "_ring", "layers")

    def __init__(self, ring: RowRing, layers: tuple[int, ...], most: int) -> None:
        self._ring, self.layers, self._left = ring, layers, most

    @property
    def wanted(self) -> bool:
        """Whether any more rows of this text are kept."""
        return self._left > 0

    def add(self, outputs: Tensor, tokens: Sequence[int]) -> None:
        """outputs: [layers, rows, hidden], of every layer, for at least the rows that these tokens followed."""
        self.add_states([outputs[layer - 1] for layer in self.layers], tokens)

    def add_states(self, states: Sequence[Tensor], tokens: Sequence[int]) -> None:
        """Keep the first rows, as many as are wanted. states: [rows, hidden] of each of `layers`."""
        kept = tokens[: self._left]
        self._left -= len(kept)
        self._ring.add(states, kept)


class OnlineExits:
    """The rows of one model's texts, and the adapters that its rounds will draft with.

    adapters: the model's own, which are replaced. num_bytes: memory for rows, which is taken now. rows_per_text: most rows of
    one text. Raises ValueError if there is memory for less than `LEAST_ROWS` rows.
    """

    def __init__(
        self, model: LayerSkipModel, adapters: Mapping[int, LeanAdapter], *, num_bytes: int, rows_per_text: int
    ) -> None:
        self.layers = (*sorted(adapters), model.num_layers)
        """Layers whose output is kept: the exits, and the last."""
        self._adapters = dict(adapters)
        self._rows_per_text = rows_per_text
        row_bytes = len(self.layers) * model.hidden_size * model.dtype.itemsize + _OTHER_BYTES
        rows = num_bytes // row_bytes
        if rows < LEAST_ROWS:
            raise ValueError(
                f"memory for rows to learn from must be at least {LEAST_ROWS * row_bytes:,} bytes for this model, got "
                f"{num_bytes:,}"
            )
        held_out = rows // HELD_OUT
        shape = len(self.layers), model.hidden_size
        self.learned = RowRing(*shape, rows - held_out, model.dtype, model.device)
        self.held_out = RowRing(*shape, held_out, model.dtype, model.device)
        self.num_bytes = rows * row_bytes
        self._lock = threading.Lock()
        self._offered: dict[int, AdapterMatrices] = {}

    def begin_text(self, prompt: Tensor) -> TextRows:
        """Where the rows of a text go. prompt: int64 [n] on the CPU.

        Texts with the same prompt, such as several answers to one request, go the same way, so that judging meets no text
        that was learned from.
        """
        number = crc32(prompt[-_HASHED_TOKENS:].numpy().tobytes())
        ring = self.learned if number % HELD_OUT else self.held_out
        return TextRows(ring, self.layers, self._rows_per_text)

    def adapter(self, exit_layer: int) -> LeanAdapter:
        """The adapter of an exit. KeyError for a layer that has none."""
        return self._adapters[exit_layer]

    def offer(self, matrices: Mapping[int, AdapterMatrices]) -> None:
        """Draft with these from the next round on. matrices: by exit layer, of `LeanAdapter.laid_out`."""
        with self._lock:
            self._offered.update(matrices)

    def adopt(self) -> None:
        """Called between two rounds: take what was offered."""
        if self._offered:
            with self._lock:
                for layer, matrices in self._offered.items():
                    self._adapters[layer].use(matrices)
                self._offered = {}
