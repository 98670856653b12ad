"""Runners that no call is using. Each call takes one for itself and gives it back when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from layerskip_models import LayerSkipModel
from selfspec.graphs.runner import CapturedRunner, captured_length
from selfspec.kv_cache import KVCache
from selfspec.runner import EagerRunner, Runner, RunnerName


class RunnerPool:
    """Lends runners of one model, each with a KV cache of its own. It keeps at most one that is idle.

    Threads may share a pool. A call that finds no idle runner (another thread's, or one made from within a streamer) gets a
    new one. A runner only ever returns to the pool that lent it, so a call that began before the weights were copied again
    cannot hand its old runner to a later call.
    """

    def __init__(self, model: LayerSkipModel, kind: RunnerName) -> None:
        self.kind: RunnerName = kind
        self._model = model
        self._idle: Runner | None = None
        self._lock = threading.Lock()

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

    def _make(self, num_tokens: int) -> Runner:
        if self.kind == "captured":
            length = captured_length(num_tokens, self._model.max_positions)
            return CapturedRunner(self._model, KVCache(self._model, length))
        return EagerRunner(self._model, KVCache(self._model, num_tokens))

    def _give_back(self, runner: Runner) -> None:
        """Keep the runner for the next call, unless the one that is idle already can do more."""
        with self._lock:
            if self._idle is None or _capacity(runner) > _capacity(self._idle):
                self._idle = runner


def _capacity(runner: Runner) -> tuple[int, int]:
    """Longer texts first, then more captures: what a later call would otherwise have to make anew."""
    return runner.cache.max_length, runner.num_captures
