"""Steered exits draft with the row that was verified last, whatever a text has been through, and no text changes by it.

`tests/law` enumerates the laws of steered drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import selfspec.engine.round
from batched_runs import LAYOUTS
from decoding import decode
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.exits import STEERED
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from layerskip_models.prefill import prefill
from policies import Policy, RoundRecord, parse_policy
from random_adapters import adapted
from scripted_policies import ScriptedExit
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence as SequenceState
from tiny_llama import request_for, tiny_llama, tiny_tokenizer

PROMPTS = [[5, 1, 7], [2], [9, 9, 3, 0, 23], [4, 4], [8, 1, 8, 1, 8, 1]]
STEERED_EXITS = (1, 3)
IN_USE: Layout = "native" if native_works(torch.device("cpu"), torch.float32) else "plain"
"""As a user has it."""


@cache
def steered_model(layout: Layout) -> LayerSkipModel:
    """Exits 1 and 3 of five are steered, by rows after layers 2 and 3; the others are bare."""
    dtype = torch.float64 if layout == "plain" else torch.float32
    llama = tiny_llama(num_layers=5, heads=4, kv_heads=2, late_scale=0.5, dtype=dtype, seed=21)
    return adapted(from_transformers(llama, layout=layout), STEERED_EXITS, form=STEERED)


def changing_plans() -> Policy:
    return Policy(ScriptedExit([(1, 3), (None, 0), (3, 2), (2, 7), (3, 4)]))


@torch.inference_mode()
def states_of(model: LayerSkipModel, text: Sequence[int], stop: int) -> Tensor:
    """[stop, rows, hidden] of a fresh pass over a text."""
    found: list[Tensor] = []
    tokens = torch.tensor(text)
    model.prepare(len(text))
    prefill(model, tokens, KVCache(model, len(text)), stop=stop, capture=lambda first, done, rows: found.append(rows))
    return torch.stack(found)


@torch.inference_mode()
def draft_after(model: LayerSkipModel, text: Sequence[int], steering_row: int, exit_layer: int) -> int:
    """What an exit drafts after this text, which ends with a pending token or a draft, steered by this row of it."""
    assert model.steering is not None
    states = states_of(model, text[: steering_row + 1], model.num_layers)
    steered = model.steering(states[[layer - 1 for layer in model.steering.layers], -1])
    hidden = states_of(model, text, exit_layer)[-1, -1:]
    return int(model.draft_logits(model.at_exit(hidden, exit_layer, steered)).argmax())


def check_drafts(model: LayerSkipModel, text: list[int], trace: Sequence[RoundRecord]) -> tuple[int, int]:
    """Every draft is a fresh pass's, steered by the last committed row. Returns how many, and how many after a rejection."""
    checked = after_rejection = 0
    rejected = False
    for record in trace:
        committed = text[: record.num_committed_before]
        for place, draft in enumerate(record.draft_tokens):
            if place >= record.num_copied:
                assert record.exit_layer is not None
                drafted = [*committed, *record.draft_tokens[:place]]
                assert draft == draft_after(model, drafted, len(committed) - 2, record.exit_layer)
                checked += 1
                after_rejection += rejected
        rejected = record.num_accepted < record.num_drafted
    return checked, after_rejection


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["changing plans", "ls:3-3", "auto:cost=layers"])
def test_drafts_are_steered_by_the_last_accepted_row(layout: Layout, policy: str) -> None:
    """Not by a rejected draft's, nor by an older one: the first round by the prompt's last row."""
    model = steered_model(layout)
    chosen = changing_plans() if policy == "changing plans" else policy
    counts = torch.zeros(2, dtype=torch.long)
    generator = SelfSpecGenerator(model, prefix_cache=0)
    for prompt in PROMPTS:
        result = generator.generate(prompt, max_new_tokens=40, policy=chosen, trace=True)
        counts += torch.tensor(check_drafts(model, result.sequences[0].tolist(), result.trace))
    assert (counts > 15).all()


def test_steering_changes_what_is_drafted() -> None:
    """Otherwise nothing here would concern it: the same adapters, steered by an earlier row, draft other tokens."""
    model = steered_model("plain")
    assert model.steering is not None
    result = SelfSpecGenerator(model).generate([5, 1, 7], max_new_tokens=20, policy="ls:3-3", trace=True)
    text = result.sequences[0].tolist()
    with pytest.raises(AssertionError):
        check_drafts(model, [text[0], text[2], text[1], *text[3:]], result.trace[:1])
    earlier, last = ([draft_after(model, text[:end], end - back, 3) for end in range(8, 20)] for back in (4, 2))
    assert earlier != last
    states = torch.zeros(len(model.steering.layers), model.hidden_size, dtype=model.dtype)
    hidden = torch.randn(4, model.hidden_size, dtype=model.dtype, generator=torch.Generator().manual_seed(1))
    zeros = model.at_exit(hidden, 3, model.steering(states))  # as where costs are timed
    torch.testing.assert_close(model.at_exit(hidden, 3), zeros)


@pytest.mark.parametrize("do_sample", [False, True])
def test_company_changes_no_draft(do_sample: bool) -> None:
    """On our kernels bit for bit: the same drafts, the same rates, and with a seed the same sampled text."""
    generator = SelfSpecGenerator(steered_model(IN_USE), prefix_cache=0)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": do_sample, "trace": True, "seed": [*range(5)]}
    alone, together = (
        generator.generate_batch(PROMPTS, policy=changing_plans(), batch_size=size, **options) for size in (1, 5)
    )
    for one, other in zip(alone, together, strict=True):
        drafts = [
            [(r.draft_tokens, r.num_accepted, r.acceptance_probabilities) for r in side.trace] for side in (one, other)
        ]
        assert (one.new_tokens, drafts[0]) == (other.new_tokens, drafts[1])


def test_a_reused_prefix_steers_as_one_that_was_read() -> None:
    """Also after an answer that a stop string cut, whose last rows were verified and not kept."""
    model = steered_model(IN_USE)
    generator = SelfSpecGenerator(model, tiny_tokenizer())
    first = generator.generate([5, 1, 7], max_new_tokens=20, policy="ls:3-4")
    words = tiny_tokenizer().decode(first.new_tokens[8:12])
    cut = generator.generate([5, 1, 7], max_new_tokens=20, policy="ls:3-4", stop_strings=[words])
    assert 8 <= len(cut.new_tokens) < 20
    again = generator.generate(cut.sequences[0], max_new_tokens=14, policy="ls:3-4", trace=True)
    assert again.stats.num_reused_tokens > 0 or model.kernels is None
    assert check_drafts(model, again.sequences[0].tolist(), again.trace)[0] > 4


@pytest.mark.parametrize("broken", ["verify", "accept"])
def test_a_round_that_broke_off_leaves_the_steering_of_the_round_before(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = steered_model("plain")
    whole = getattr(selfspec.engine.round, broken)
    calls = [0]

    def breaks(*arguments: Any) -> Any:
        calls[0] += 1
        found = whole(*arguments)
        if calls[0] % 3 == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(selfspec.engine.round, broken, breaks)
    request = request_for(model, [5, 1, 7], max_new_tokens=20)
    text = SequenceState(model, KVCache(model, 40), request, parse_policy("ls:3-3", num_layers=5))
    records: list[RoundRecord] = []
    while text.stop_reason is None:
        with suppress(KeyboardInterrupt), torch.inference_mode():
            for output in decode(text, EagerRunner(model)):
                records += [] if output.record is None else [output.record]
    assert calls[0] > 6
    assert check_drafts(model, text.tokens[0, : text.length].tolist(), records)[0] > 6
