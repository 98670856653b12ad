"""The first of two stages: layers [0, E) draft ahead, row after row, until the second stage says what became of it.

Each message to the second stage is a row's exit state and the token that was drafted from it. Messages carry the number of
rejections that the drafter knows of, so those that were on their way when a rejection came can be told apart.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from time import perf_counter

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.native_steps import NativeSteps
from layerskip_models.kernels.threads import usable_cores
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from selfspec.parallel.stage_messages import (
    OVER,
    Begin,
    DraftedRow,
    End,
    Failed,
    Verified,
    as_array,
    processors_on,
)
from selfspec.parallel.stage_plan import StageLayers
from selfspec.runtime.torch_mode import engine_mode
from selfspec.sampling import Sampler

_GUESS = 0  # drafted where an exit says nothing: verification judges it like any other draft


class DraftingStage:
    """Drafts for one text after the other, told by the second stage through a connection. For one thread."""

    def __init__(self, model: LayerSkipModel, connection: Connection) -> None:
        self._model, self._connection = model, connection
        self._steps: NativeSteps | None = model.steps()
        self._last = torch.empty(1, model.hidden_size, dtype=model.dtype, device=model.device)

    def serve(self) -> None:
        """Until None comes, or the other end is closed."""
        try:
            while (said := self._connection.recv()) is not None:
                if isinstance(said, Begin):
                    self._serve_text(said)
                self._connection.send(OVER)  # to the End that the text ended with, or to one between two texts
        except (EOFError, ConnectionError):
            return

    def _serve_text(self, begin: Begin) -> None:
        model = self._model
        try:
            with engine_mode(model.device), model.on_one_team():
                self._text(begin)
        except (EOFError, ConnectionError):
            raise
        except Exception as error:
            self._connection.send(Failed.because(error))
            while not isinstance(said := self._connection.recv(), End):
                if said is None:
                    raise EOFError from error

    def _text(self, begin: Begin) -> None:
        """From the prompt to End."""
        model, connection, device = self._model, self._connection, self._model.device
        length = len(begin.prompt)
        tokens = torch.zeros(1, begin.max_length + 1, dtype=torch.long, device=device)
        tokens[0, :length] = torch.tensor(begin.prompt, device="cpu")
        cache = KVCache(model, tokens.shape[1])
        # Piece by piece, so that the second stage reads one while this one reads the next.
        prefill(model, tokens[0, :length], cache, capture=lambda first, done, rows: self._hand_on(done, rows))
        source = None if begin.seed is None else torch.Generator(device)
        seeds = None if begin.seed is None else _seeds(begin.seed, tokens.shape[1])
        sampler = Sampler(processors_on(begin.processors, device), source)
        rejections = 0
        drafted = waiting = 0  # tokens behind the committed ones; of them, sent and not judged
        seconds = 0.0  # of the step before
        # First comes the first token, as if a draft before it had been rejected.
        while not isinstance(said := connection.recv(), End):
            if not isinstance(said, Verified):
                raise EOFError
            length += said.count
            drafted -= said.count
            waiting -= said.count
            if said.token is not None:
                rejections += 1
                tokens[0, length] = said.token
                length, drafted, waiting = length + 1, 0, 0
                cache.roll_back(length - 1)
            while not connection.poll():
                if waiting >= said.ahead or length + drafted >= begin.max_length:
                    break
                started = perf_counter()
                if source is not None and seeds is not None:
                    source.manual_seed(seeds[length + drafted])
                row = self._step(tokens, length + drafted, cache, sampler, rejections)
                row.seconds = seconds
                connection.send(row)
                seconds = perf_counter() - started
                tokens[0, length + drafted] = row.token
                drafted, waiting = drafted + 1, waiting + 1

    def _hand_on(self, layers_done: int, rows: Tensor) -> None:
        if layers_done == self._model.num_layers:
            self._connection.send(as_array(rows))

    def _step(self, tokens: Tensor, length: int, cache: KVCache, sampler: Sampler, rejections: int) -> DraftedRow:
        """A row of the last of `length` tokens, and what is drafted behind it."""
        model, pending = self._model, int(tokens[0, length - 1])
        if self._steps is not None and not sampler.do_sample and not sampler.processors:
            (look,) = self._steps.tokens([pending], ((cache, 1),), model.num_layers, self._last, head="draft")
            return DraftedRow(rejections, as_array(self._last[0].clone()), look.token, None)
        hidden = model.run_layers(model.embed_one(pending), 0, model.num_layers, cache)
        logits = model.draft_logits(model.at_exit(hidden, model.num_layers))
        token, q = _draft(logits, tokens, length, sampler)
        return DraftedRow(rejections, as_array(hidden[0]), token, None if q is None else as_array(q))


def _draft(logits: Tensor, tokens: Tensor, length: int, sampler: Sampler) -> tuple[int, Tensor | None]:
    """A token, and when sampling the distribution that it was drawn from.

    Plain decoding never sees this row. So neither logits that hold NaN nor a processor that refuses a text which is only
    drafted may end the text. Some token is drafted there with certainty, and verification keeps the law whatever it is.
    """
    try:
        processed = sampler.process(logits, tokens, length)[0]
        if not sampler.do_sample:
            return int(processed.argmax()), None
        q = processed.softmax(dim=-1)
        return sampler.draw(q, f"draft position {length}"), q
    except Exception:  # should the text itself have come to that, verification says so
        if not sampler.do_sample:
            return _GUESS, None
        q = torch.zeros_like(logits[0])
        q[_GUESS] = 1.0
        return _GUESS, q


def _seeds(seed: int, count: int) -> list[int]:
    """One for every position, so that what is drafted there does not depend on how much was thrown away before."""
    source = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(2**62, (count,), generator=source, device="cpu").tolist()


def run_drafting_stage(connection: Connection, stage: StageLayers, cores: Sequence[int] | None) -> None:
    """A process of its own: loads its layers, says that it is there, and drafts. An error is sent in place of that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's to handle, which then ends this one
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(max(1, usable_cores() // 2) if cores is None else len(cores))
    try:
        drafting = DraftingStage(stage.load(), connection)
    except Exception as error:
        connection.send(Failed.because(error))
        return
    connection.send(OVER)
    drafting.serve()
