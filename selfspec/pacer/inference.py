"""Pacer's pre-verifier in use: its own KV cache, the rows that it still has to read, and its estimates for a block."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from pathlib import Path
from time import perf_counter
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from policies import ContextStates
from policies.bounds import MAX_DRAFTS, check_number
from selfspec.engine.runners.runner import engine_mode
from selfspec.pacer import PAPER
from selfspec.pacer.network import (
    CONFIG_FILE,
    FEATURES,
    FOLDER,
    LeanPreVerifier,
    check_fits,
    load_preverifier,
)

_TIMED_POSITIONS, _TIMED_COMMITTED = 320, 4  # of a sequence while passes are timed, and the rows that each adds to it
_CHUNK = 1024  # rows per pass over a long context


class PreVerification:
    """A pre-verifier for one policy. Lazy: nothing runs for an exit layer before its first block of a text.

    The cache of an exit layer holds the committed rows that it has read, without draft-position embedding, and after them the
    blocks of the round. The rows that a round commits are read in the next round's first pass and overwrite its drafts, so
    the cache is rolled back by setting its length, as the main one is.
    """

    def __init__(self, network: LeanPreVerifier) -> None:
        self.network = network
        self._caches: dict[int, KVCache] = {}
        self._committed: dict[int, int] = {}  # exit layer -> committed rows in its cache
        self._reliability = 1.0  # chance that all drafts of the round so far are accepted
        self._text: ReferenceType[ContextStates] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> PreVerification:
        """For another sequence at the same time: the same network, with caches of its own."""
        return PreVerification(self.network)

    @property
    def exit_layers(self) -> tuple[int, ...]:
        return self.network.config.exit_layers

    @property
    def defaults(self) -> Mapping[str, float]:
        """Best settings of the stopping rule, as measured where it was trained."""
        return self.network.config.policy

    def estimate(
        self,
        context: ContextStates,
        exit_layer: int,
        position: int,
        first_index: int,
        hidden: Tensor,
        features: Tensor,
    ) -> list[float]:
        """See `policies.PreVerifier`."""
        if self._text is None or self._text() is not context:
            self._committed.clear()
            self._text = ref(context)
        cache = self._cache(exit_layer, context.max_length)
        network = self.network
        rows = network.draft_inputs(hidden, features, first_index, exit_layer)
        start = position - first_index + 1  # of the draft: the committed rows are those before it
        if first_index == 1:  # the last round's drafts are overwritten
            # The cache holds fewer rows than were to be committed to it if a pass was broken off.
            cache.roll_back(min(self._committed.get(exit_layer, 0), start, cache.length))
            while cache.length < start:  # the last of these rows in one pass with the block
                end = min(cache.length + _CHUNK, start)
                read = network.context_inputs(context.rows(exit_layer, cache.length, end), exit_layer)
                if end == start:
                    rows = torch.cat([read, rows])
                    break
                network.layer.run_layers(read, 0, 1, cache)
        self._committed[exit_layer] = start
        out = network.layer.run_layers(rows, 0, 1, cache)[-hidden.shape[0] :]
        estimates = network.estimates(out, exit_layer)
        if network.config.design == PAPER:
            return estimates
        before = 1.0 if first_index == 1 else self._reliability
        chances = [*accumulate(estimates, mul, initial=before)][1:]
        self._reliability = chances[-1]
        return chances

    def pass_seconds(self, block: int) -> float:
        """See `policies.PreVerifier`: of a pass over the block and what a round commits, at position 250 or so. Timed once.

        Raises ValueError for a block outside [1, MAX_DRAFTS].
        """
        check_number("b", block, 1, MAX_DRAFTS)
        known = self.network.pass_seconds
        if block not in known:
            known[block] = self._timed(block)
        return known[block]

    def _timed(self, block: int) -> float:
        network, size = self.network, self.network.layer.hidden_size
        layer, device = self.exit_layers[0], network.layer.device
        text = _Zeros(torch.zeros(_TIMED_POSITIONS, size, dtype=network.layer.dtype, device=device))
        hidden = text.rows(layer, 0, block)
        features = torch.zeros(block, len(FEATURES), dtype=torch.float32, device=device)
        asked = PreVerification(network)
        times = []
        with engine_mode(device), network.layer.on_one_team():
            for position in range(_TIMED_POSITIONS // 2, _TIMED_POSITIONS - block, _TIMED_COMMITTED):
                start = perf_counter()
                asked.estimate(text, layer, position, 1, hidden, features)
                times.append(perf_counter() - start)
        return sorted(times[1:])[len(times) // 4]  # the first had all the text before it

    def _cache(self, exit_layer: int, max_length: int) -> KVCache:
        cache = self._caches.get(exit_layer)
        if cache is None or cache.max_length < max_length:
            cache = self._caches[exit_layer] = KVCache(self.network.layer, max_length)
            self._committed.pop(exit_layer, None)
        return cache


class _Zeros:
    """A sequence whose exit hidden states are all 0."""

    def __init__(self, states: Tensor) -> None:
        self.max_length = states.shape[0]
        self._states = states

    def rows(self, exit_layer: int, start: int, stop: int) -> Tensor:
        return self._states[start:stop]


class PreVerifiers:
    """Loads pre-verifiers for one model, each once; `parse_policy` takes it."""

    def __init__(self, model: LayerSkipModel) -> None:
        self._model = model
        self._loaded: dict[str, LeanPreVerifier] = {}

    def __call__(self, folder: str | None = None) -> PreVerification:
        """Load a folder's pre-verifier, or the checkpoint's own, ready for one policy.

        Raises FileNotFoundError or ValueError if there is none, or if it was trained for another model.
        """
        name = self._model.name
        if folder is None and not has_preverifier(name):
            raise ValueError(
                f"there is no pre-verifier beside {name or 'this model'}: train one with selfspec train-pacer and say"
                " pacer:FOLDER"
            )
        path = str(Path(name or "") / FOLDER) if folder is None else folder
        if path not in self._loaded:
            module = load_preverifier(path)
            check_fits(module.config, self._model, path)
            self._loaded[path] = LeanPreVerifier(module, self._model.dtype, self._model.device)
        return PreVerification(self._loaded[path])


def has_preverifier(name: str | None) -> bool:
    """Say whether the checkpoint of this name is a folder that holds a pre-verifier."""
    return name is not None and (Path(name) / FOLDER / CONFIG_FILE).is_file()
