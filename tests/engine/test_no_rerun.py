"""No layer runs twice for a row that is committed or drafted, prefill included. `test_many_rows` counts native calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decoding import decode
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.choices import Choices, Detail
from layerskip_models.kv_cache import CacheRows, KVCache, cache_rows
from policies import Policy, RoundRecord, parse_policy
from scripted_policies import ScriptedExit, StopAtTokens, StopBelow
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from tiny_llama import request_for, tiny_llama

NUM_LAYERS = 4


class CountingModel:
    """Counts (layer, position) pairs as they run; everything else is the model's own."""

    def __init__(self, model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: Counter[tuple[int, int]] = Counter()
        self.heads = 0
        run_layers, logits, draft_logits = model.run_layers, model.logits, model.draft_logits

        def counted_layers(
            hidden: Tensor,
            start: int,
            stop: int,
            cache: KVCache,
            capture: Callable[[int, Tensor], None] | None = None,
        ) -> Tensor:
            self._count(cache_rows(cache, hidden.shape[0]), start, stop)
            return run_layers(hidden, start, stop, cache, capture)

        def counted_logits(hidden: Tensor) -> Tensor:
            self.heads += hidden.shape[0]
            return logits(hidden)

        monkeypatch.setattr(model, "run_layers", counted_layers)

        def counted_draft_logits(hidden: Tensor) -> Tensor:
            self.heads += hidden.shape[0]
            return draft_logits(hidden)

        monkeypatch.setattr(model, "logits", counted_logits)
        monkeypatch.setattr(model, "draft_logits", counted_draft_logits)
        for name in ("choices", "draft_choices"):
            monkeypatch.setattr(model, name, self._counted_choices(getattr(model, name)))

    def _counted_choices(self, choices: Callable[..., Choices]) -> Callable[..., Choices]:
        def counted(hidden: Tensor, detail: Detail = "token") -> Choices:
            self.heads += hidden.shape[0]
            return choices(hidden, detail)

        return counted

    def _count(self, where: CacheRows, start: int, stop: int) -> None:
        ((cache, number),) = where  # of one text
        position = cache.position(start, stop)
        self.ran.update((layer, position + row) for layer in range(start, stop) for row in range(number))

    def take(self) -> tuple[Counter[tuple[int, int]], int]:
        """What ran since the last call."""
        ran, heads = self.ran, self.heads
        self.ran, self.heads = Counter(), 0
        return ran, heads


def expected_rows(record: RoundRecord) -> Counter[tuple[int, int]]:
    """Every layer once for the pending token and each kept draft; nothing else, whatever was looked at."""
    first = record.num_committed_before - 1
    rows = range(first, first + record.num_drafted + 1)
    return Counter((layer, row) for layer in range(NUM_LAYERS) for row in rows)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "stopping", [None, StopBelow(0.35), StopAtTokens(range(0, 24, 3))], ids=["cap", "before a draw", "after a draw"]
)
def test_no_layer_runs_twice(
    stopping: StopBelow | StopAtTokens | None, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = from_transformers(tiny_llama(num_layers=NUM_LAYERS, late_scale=0.6, seed=3), layout="plain")
    counting = CountingModel(model, monkeypatch)
    policy = Policy(ScriptedExit([(1, 5), (3, 3), (None, 0), (2, 1)]), stopping)
    causes: Counter[str] = Counter()
    for seed, prompt in enumerate([[7], [3, 3, 9, 1, 20], [0, 1], [12] * 8]):
        request = request_for(model, prompt, seed=seed, max_new_tokens=40, do_sample=do_sample, eos_token_id=[11])
        text = Sequence(model, KVCache(model, len(prompt) + 40), request, policy)
        with torch.inference_mode():
            for committed in decode(text, EagerRunner(model)):
                record = committed.record
                ran, heads = counting.take()
                if record is None:
                    assert ran == Counter((layer, row) for layer in range(NUM_LAYERS) for row in range(len(prompt)))
                    assert heads == 1  # the last position's logits only
                    continue
                causes[record.stop_cause] += 1
                assert ran == expected_rows(record)
                # What the statistics call loaded layers: weights read once for all rows of a pass.
                exit_layer, drafted = record.exit_layer, record.num_drafted
                loaded = NUM_LAYERS if exit_layer is None else (drafted + 1) * exit_layer + NUM_LAYERS - exit_layer
                assert record.loaded_layers == loaded
                looked_at = drafted + (record.stop_cause == "before_draw")
                assert heads == looked_at + drafted + 1
    wanted = {None: "cap", StopBelow: "before_draw", StopAtTokens: "after_draw"}
    assert causes[wanted[type(stopping) if stopping else None]] > 0
    assert causes["none"] > 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", ["copy:5", "auto:cost=layers"])
def test_no_layer_runs_twice_where_tokens_are_copied(
    name: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = from_transformers(tiny_llama(num_layers=NUM_LAYERS, late_scale=0.6, seed=3), layout="plain")
    counting = CountingModel(model, monkeypatch)
    copied = 0
    for seed, prompt in enumerate([[3, 9, 1] * 5, [0, 1] * 4, [12] * 8, [5, 6, 7, 8] * 4]):
        # Sampled at a temperature at which texts still repeat themselves.
        options = {"do_sample": True, "temperature": 0.3, "seed": seed} if do_sample else {}
        request = request_for(model, prompt, max_new_tokens=40, **options)
        text = Sequence(model, KVCache(model, len(prompt) + 40), request, parse_policy(name, num_layers=NUM_LAYERS))
        with torch.inference_mode():
            for committed in decode(text, EagerRunner(model)):
                record = committed.record
                ran, _ = counting.take()
                if record is None:
                    continue
                assert ran == expected_rows(record)
                copied += record.num_copied
    assert copied > 0
