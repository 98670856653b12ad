"""Runners that no call is using. Each call takes one for itself and gives it back when it ends."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from layerskip_models import LayerSkipModel
from selfspec.graphs.captured_runner import CapturedRunner, captured_length
from selfspec.kv_cache import KVCache
from selfspec.passes import EagerRunner, Runner, RunnerName


class RunnerPool:
    """Lends runners of one model, each with a KV cache of its own. It keeps at most one that is idle.

    Threads may share a pool. A call that finds no idle runner (another thread's, or one made from within a streamer) gets a
    new one. A runner only ever returns to the pool that lent it, so a call that began before the weights were copied again
    cannot hand its old runner to a later call.
    on_giving_up: called once when captured runners are given up, because graphs fail.
    """

    def __init__(
        self, model: LayerSkipModel, kind: RunnerName, on_giving_up: Callable[[], None] = lambda: None
    ) -> None:
        self.kind: RunnerName = kind
        self._on_giving_up = on_giving_up
        self._model = model
        self._idle: Runner | None = None
        self._lock = threading.RLock()  # re-entered when a stream is finalised by the garbage collector

    @contextmanager
    def lend(self, num_tokens: int) -> Iterator[Runner]:
        """A runner for one call, whose KV cache is empty and has room for a text of `num_tokens` tokens."""
        runner = self._take(num_tokens)
        try:
            yield runner
        finally:
            self._give_back(runner)

    def _take(self, num_tokens: int) -> Runner:
        with self._lock:
            runner, self._idle = self._idle, None
        if runner is not None and runner.cache.max_length < num_tokens:
            runner = None  # freed before the longer one is allocated
        if runner is None:
            runner = self._make(num_tokens)
        runner.cache.roll_back(0)
        return runner

    def give_up_graphs(self, error: RuntimeError) -> None:
        """Lend eager runners from now on, and warn of it once: graphs do not work here, for this reason."""
        with self._lock:
            if self.kind == "eager":
                return
            self.kind = "eager"
            self._idle = None
        self._on_giving_up()
        warnings.warn(
            f"CUDA graphs are not used, decoding will be slower: {error}. The text goes on with runner='eager'",
            RuntimeWarning,
            stacklevel=2,
        )

    def _make(self, num_tokens: int) -> Runner:
        if self.kind == "captured":
            length = captured_length(num_tokens, self._model.max_positions)
            try:
                return CapturedRunner(self._model, KVCache(self._model, length))
            except RuntimeError as error:  # no memory for its buffers, say
                self.give_up_graphs(error)
        return EagerRunner(self._model, KVCache(self._model, num_tokens))

    def _give_back(self, runner: Runner) -> None:
        """Keep the runner for the next call, unless the one that is idle already can do more."""
        with self._lock:
            if isinstance(runner, CapturedRunner) and self.kind == "eager":
                return
            if self._idle is None or _capacity(runner) > _capacity(self._idle):
                self._idle = runner


def _capacity(runner: Runner) -> tuple[int, int]:
    """Longer texts first, then more captures: what a later call would otherwise have to make anew."""
    return runner.cache.max_length, runner.num_captures
