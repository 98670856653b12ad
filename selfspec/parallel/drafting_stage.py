"""The first of two stages: layers [0, E) draft ahead, row after row, until the second stage says what became of it.

Each message to the second stage is a row's exit state and the token that was drafted from it. Messages carry the number of
rejections that the drafter knows of, so those that were on their way when a rejection came can be told apart.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.native_steps import NativeSteps
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel.shard_loading import load_layers
from layerskip_models.prefill import prefill
from selfspec.runtime.torch_mode import engine_mode
from selfspec.sampling import Sampler

OVER_ASKED, OVER = "over?", "over"
"""Asked and answered between two texts: everything of the one before has then arrived."""


@dataclass(slots=True, kw_only=True, eq=False)
class Begin:
    """A text. prompt: ids. seed: of the drafts' random numbers, None when greedy. ahead: most drafts that wait."""

    prompt: list[int]
    max_length: int
    processors: LogitsProcessorList
    seed: int | None
    ahead: int


@dataclass(slots=True, eq=False)
class Verified:
    """What became of the oldest drafts: `count` were accepted; `token` follows them, None if nothing was rejected.

    ahead: most drafts that wait from now on.
    """

    count: int
    token: int | None
    ahead: int


class End:
    """The text is complete, or the second stage has no use for it any more."""


@dataclass(slots=True, eq=False)
class DraftedRow:
    """rejections: that the drafter had heard of. hidden: exit state, [hidden], of the row that `token` was drafted from.

    q: float32 [vocab], what it was drawn from when sampling. seconds: of the step before, with its sending; 0 for none.
    Arrays, since a tensor would go through shared memory, which takes longer to set up than these take to copy.
    """

    rejections: int
    hidden: NDArray[Any]
    token: int
    q: NDArray[np.float32] | None
    seconds: float = 0.0


class DraftingStage:
    """Drafts for one text after the other, told by the second stage through a connection. For one thread."""

    def __init__(self, model: LayerSkipModel, connection: Connection) -> None:
        self._model, self._connection = model, connection
        self._steps: NativeSteps | None = model.steps()
        self._last = torch.empty(1, model.hidden_size, dtype=model.dtype, device=model.device)

    def serve(self) -> None:
        """Until None comes, or the other end is closed."""
        while True:
            try:
                said = self._connection.recv()
                if said is None:
                    return
                if said == OVER_ASKED:
                    self._connection.send(OVER)
                elif isinstance(said, Begin):
                    with engine_mode(self._model.device), self._model.on_one_team():
                        self._text(said)
            except EOFError:
                return
            except BrokenPipeError:
                return

    def _text(self, begin: Begin) -> None:
        model, connection = self._model, self._connection
        length = len(begin.prompt)
        tokens = torch.zeros(1, begin.max_length + begin.ahead + 64, dtype=torch.long, device=model.device)
        tokens[0, :length] = torch.tensor(begin.prompt)
        cache = KVCache(model, tokens.shape[1])
        states: list[Tensor] = []
        prefill(model, tokens[0, :length], cache, capture=lambda first, done, rows: _keep(states, done, model, rows))
        connection.send(torch.cat(states).numpy())
        source = None if begin.seed is None else torch.Generator(model.device).manual_seed(begin.seed)
        sampler = Sampler(begin.processors, source)
        rejections = waiting = 0
        said: Verified | End = connection.recv()  # the first token, as if a draft before it had been rejected
        ahead = begin.ahead
        drafted, seconds = 0, 0.0  # behind the committed ones; of the step before
        while True:
            if isinstance(said, End):
                return
            ahead = said.ahead
            length += said.count
            drafted -= said.count
            waiting -= said.count
            if said.token is not None:
                rejections += 1
                tokens[0, length] = said.token
                length, drafted, waiting = length + 1, 0, 0
                cache.roll_back(length - 1)
            while not connection.poll():
                if waiting >= ahead or length + drafted >= begin.max_length:
                    break
                started = perf_counter()
                row = self._step(tokens, length + drafted, cache, sampler, rejections)
                row.seconds = seconds
                connection.send(row)
                seconds = perf_counter() - started
                tokens[0, length + drafted] = row.token
                drafted, waiting = drafted + 1, waiting + 1
            said = connection.recv()

    def _step(self, tokens: Tensor, length: int, cache: KVCache, sampler: Sampler, rejections: int) -> DraftedRow:
        """A row of the last of `length` tokens, and what is drafted behind it."""
        model, pending = self._model, int(tokens[0, length - 1])
        q: Tensor | None = None
        if self._steps is not None and not sampler.do_sample and not sampler.processors:
            (look,) = self._steps.tokens([pending], ((cache, 1),), model.num_layers, self._last, head="draft")
            hidden, token = self._last[0].clone(), look.token
        else:
            hidden = model.run_layers(model.embed_one(pending), 0, model.num_layers, cache)
            logits = sampler.process(model.draft_logits(hidden), tokens, length)
            hidden = hidden[0]
            if sampler.do_sample:
                q = logits[0].softmax(dim=-1)
                token = sampler.draw(q, f"draft position {length}")
            else:
                token = int(logits.argmax())
        kept = None if q is None else q.numpy()
        return DraftedRow(rejections, hidden.numpy(), token, kept)


def _keep(states: list[Tensor], layers_done: int, model: LayerSkipModel, rows: Tensor) -> None:
    if layers_done == model.num_layers:
        states.append(rows.clone())


def run_drafting_stage(
    connection: Connection, name: str, exit_layer: int, options: dict[str, Any], cores: Sequence[int] | None
) -> None:
    """A process of its own: loads its layers, says that it is there, and drafts. An error is sent in place of that."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    try:
        model = load_layers(name, range(exit_layer), **options)
        stage = DraftingStage(model, connection)
    except Exception as error:
        connection.send(error)
        return
    connection.send(None)
    stage.serve()
