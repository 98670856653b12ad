"""No layer runs twice for a row, prefill included, and rounds allocate little. `test_many_rows` counts native calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from decoding import decode
from layerskip_models import from_transformers
from layerskip_models.kv_cache import KVCache
from policies import Policy, RoundRecord, parse_policy
from scripted_policies import ScriptedExit, StopAtTokens, StopBelow, fixed
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from tiny_llama import request_for, tiny_llama
from watched_passes import CountingModel, LargestAllocation

NUM_LAYERS = 4


def expected_rows(record: RoundRecord) -> Counter[tuple[int, int]]:
    """Every layer once for the pending token and each kept draft; nothing else, whatever was looked at."""
    first = record.num_committed_before - 1
    rows = range(first, first + record.num_drafted + 1)
    return Counter((layer, row) for layer in range(NUM_LAYERS) for row in rows)


CAUSES = {name: (name, "none") for name in ("cap", "before_draw", "after_draw")}
SCRIPT = [(1, 5), (3, 3), (None, 0), (2, 1)]
POLICIES: dict[str, Callable[[], Policy]] = {
    "cap": lambda: Policy(ScriptedExit(SCRIPT)),
    "before_draw": lambda: Policy(ScriptedExit(SCRIPT), StopBelow(0.35)),
    "after_draw": lambda: Policy(ScriptedExit(SCRIPT), StopAtTokens(range(0, 24, 3))),
    "copy:5": lambda: parse_policy("copy:5", num_layers=NUM_LAYERS),
    "auto:cost=layers": lambda: parse_policy("auto:cost=layers", num_layers=NUM_LAYERS),
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_no_layer_runs_twice(name: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled at a temperature at which texts still repeat themselves, where tokens are copied."""
    model = from_transformers(tiny_llama(num_layers=NUM_LAYERS, late_scale=0.6, seed=3), layout="plain")
    counting = CountingModel(model, monkeypatch)
    policy = POLICIES[name]()
    causes: Counter[str] = Counter()
    for seed, prompt in enumerate([[3, 3, 9, 1, 20], [3, 9, 1] * 5, [0, 1] * 4, [12] * 8, [7]]):
        options = {"do_sample": True, "temperature": 1.0 if name in CAUSES else 0.3, "seed": seed} if do_sample else {}
        request = request_for(model, prompt, max_new_tokens=40, eos_token_id=[11], **options)
        text = Sequence(model, KVCache(model, len(prompt) + 40), request, policy)
        with torch.inference_mode():
            for committed in decode(text, EagerRunner(model)):
                record = committed.record
                ran, heads = counting.take()
                if record is None:
                    assert ran == Counter((layer, row) for layer in range(NUM_LAYERS) for row in range(len(prompt)))
                    assert heads == 1 or name not in CAUSES  # the last position's logits only
                    continue
                assert ran == expected_rows(record)
                causes[record.stop_cause] += 1
                causes["copied"] += record.num_copied
                if name in CAUSES:
                    # What the statistics call loaded layers: weights read once for all rows of a pass.
                    exit_layer, drafted = record.exit_layer, record.num_drafted
                    loaded = NUM_LAYERS if exit_layer is None else (drafted + 1) * exit_layer + NUM_LAYERS - exit_layer
                    assert record.loaded_layers == loaded
                    assert heads == drafted + (record.stop_cause == "before_draw") + drafted + 1
    assert all(causes[cause] for cause in CAUSES.get(name, ("copied",)))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("policy", ["ar", "ls:1-6", "stopping"])
def test_rounds_allocate_nothing_that_grows_with_the_context(policy: str, do_sample: bool) -> None:
    """A context of 8,192: one layer's keys would be 262 kB, a round's own tensors stay well under that."""
    llama = tiny_llama(num_layers=3, max_position_embeddings=8192, seed=3)
    model = from_transformers(llama, layout="plain")
    chosen = fixed(1, 6, StopBelow(0.3)) if policy == "stopping" else parse_policy(policy, num_layers=3)
    prompt = [i * i % 24 for i in range(2000)]
    cache = KVCache(model, 8192)
    one_layer_keys = cache.num_bytes // model.num_layers // 2
    assert one_layer_keys == 8192 * 8 * 4
    request = request_for(model, prompt, seed=1, max_new_tokens=30, do_sample=do_sample, eos_token_id=[])
    text = Sequence(model, cache, request, chosen)
    with torch.inference_mode():
        rounds = decode(text, EagerRunner(model))
        next(rounds)
        with LargestAllocation() as largest:
            for _ in rounds:
                pass
    assert text.num_new == 30
    # The largest are one layer's attention scores, rows x heads x context, or the mask of more rows: 7 x 2,030 floats.
    assert 0 < largest.num_bytes < one_layer_keys // 2, largest.operator
    assert cache.num_bytes == 2 * model.num_layers * one_layer_keys
    with torch.inference_mode(), LargestAllocation() as largest:  # sees one concatenation of a layer's keys
        torch.cat([torch.zeros(1, 1, 2000, 8), torch.zeros(1, 1, 1, 8)], dim=2)
    assert largest.num_bytes == 2001 * 8 * 4
