"""Captured rounds: they are those of the eager runner, nothing of a round is baked in, and few things are captured.

On a CPU the stand-in replays noted operations; `test_on_cuda.py` does the same with CUDA graphs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import selfspec.engine.runners.cuda_graph.buffers
import selfspec.engine.runners.cuda_graph.capture
import selfspec.engine.runners.cuda_graph.first_rounds
import selfspec.engine.runners.cuda_graph.runner
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kv_cache import KVCache
from policies import DraftRow, NeverStop, Policy, RoundRecord, parse_policy
from scripted_policies import EVERY_POLICY, ScriptedExit, StopBelow, named_policy
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from selfspec.cli.display import summary_lines
from selfspec.engine.calibrate import measured_cost
from selfspec.engine.runners.cuda_graph.buffers import StaticPass
from selfspec.engine.runners.cuda_graph.capture import MAX_CAPTURES, Captures, RecordedOperations
from selfspec.engine.runners.cuda_graph.forward import StaticForward
from selfspec.engine.runners.cuda_graph.runner import captured_length
from tiny_llama import full_logits, reference_greedy, tiny_llama

PROMPT = [5, 1, 7]
CPU = torch.device("cpu")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_captures")]


@pytest.fixture(scope="module")
def text64(llama64: LlamaForCausalLM) -> list[int]:
    """How transformers continues the prompt. Its beginnings are what fewer new tokens are."""
    return reference_greedy(llama64, PROMPT, max_new_tokens=30)


def pair(llama: LlamaForCausalLM) -> tuple[SelfSpecGenerator, SelfSpecGenerator]:
    """An eager and a captured generator over one model."""
    model = from_transformers(llama, layout="plain")
    return SelfSpecGenerator(model, runner="eager"), SelfSpecGenerator(model, runner="captured")


# Nothing is baked in


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rounds are not compared with eager ones, so that a fault shows."""
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.first_rounds, "CHECKED", 0)


@pytest.mark.usefixtures("unchecked")
def test_a_position_baked_in_is_seen(
    llama64: LlamaForCausalLM, text64: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that a capture invites: with a Python number for the position, the text is another one."""
    original = StaticForward.run

    def baked(self: StaticForward, hidden: Tensor, start: int, stop: int, positions: Tensor, *rest: Any) -> Tensor:
        first = positions.tolist()[0]  # no operation: nothing notes it
        return original(self, hidden, start, stop, torch.arange(first, first + positions.shape[0]), *rest)

    expected = text64[:20]
    for policy in ("ar", "ls:2-3"):
        assert pair(llama64)[1].generate(PROMPT, max_new_tokens=20, policy=policy).new_tokens == expected
    monkeypatch.setattr(StaticForward, "run", baked)
    for policy in ("ar", "ls:2-3"):
        assert pair(llama64)[1].generate(PROMPT, max_new_tokens=20, policy=policy).new_tokens != expected


@pytest.mark.usefixtures("unchecked")
def test_a_row_count_baked_in_is_seen(
    llama64: LlamaForCausalLM, text64: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of changing length share captures for row counts: were `last` a number, rounds would verify too few."""
    original = StaticPass._rows

    def baked(self: StaticPass, rows: int) -> Tensor:
        return torch.full_like(original(self, rows), self.last.tolist()[0])

    policy = Policy(ScriptedExit([(2, 2), (2, 3), (2, 1)]))
    eager, captured = pair(llama64)
    rounds = eager.generate(PROMPT, max_new_tokens=30, policy=policy).stats.rounds
    good = captured.generate(PROMPT, max_new_tokens=30, policy=policy)
    assert (good.new_tokens, good.stats.rounds) == (text64, rounds)
    monkeypatch.setattr(StaticPass, "_rows", baked)
    bad = pair(llama64)[1].generate(PROMPT, max_new_tokens=30, policy=policy)
    assert (bad.new_tokens, bad.stats.rounds) != (text64, rounds)


# The same rounds as eager


def facts(record: RoundRecord) -> tuple[Any, ...]:
    """All of a record that is no time; numbers rounded."""
    shadow = record.shadow
    return (
        record.exit_layer, record.draft_tokens, record.num_accepted, record.tokens, record.loaded_layers,
        record.stop_cause, record.num_committed_before,
        record.confidences and [round(c, 5) for c in record.confidences],
        record.acceptance_probabilities and [round(c, 5) for c in record.acceptance_probabilities],
        shadow and (shadow.tokens.tolist(), shadow.target_tokens.tolist()),
        shadow and shadow.confidences.double().round(decimals=5).tolist(),
    )  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "eos": {"eos_token_id": [16, 3]},
    "processors": {"repetition_penalty": 1.3, "eos_token_id": [11]},
    "sampled": {"do_sample": True, "seed": 4, "top_k": 8},
    "sampled with all": {"do_sample": True, "seed": 5, "eos_token_id": [3, 20], "repetition_penalty": 1.2},
}
SOME_POLICIES = EVERY_POLICY[2::5]  # with one that ends drafts before a draw


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("greedy", EVERY_POLICY),
        ("eos", EVERY_POLICY[1::5]),  # some of these draft it; all of it meets every policy in the last one
        ("processors", SOME_POLICIES),
        ("sampled", SOME_POLICIES),
        ("sampled with all", EVERY_POLICY),
        pytest.param("eos", EVERY_POLICY, marks=pytest.mark.slow),
        pytest.param("processors", EVERY_POLICY, marks=pytest.mark.slow),
        pytest.param("sampled", EVERY_POLICY, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} policies",
)
def test_rounds_are_those_of_the_eager_runner(options: str, names: tuple[str, ...]) -> None:
    """Draft by draft: counts, causes, confidences, shadow tokens, samples."""
    asked = OPTIONS[options]
    eager, captured = pair(tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3))
    causes: Counter[str] = Counter()
    for name in names:
        # `auto` copies where the runner verifies copies, so with captures it does not.
        named = re.sub(r"auto:?", "auto:copy=off,", name).replace(",+", "+").removesuffix(",")
        results = []
        for engine in (eager, captured):
            policy = named_policy(named, 2, engine.model)
            results.append(engine.generate(PROMPT, max_new_tokens=25, policy=policy, trace=True, **asked))
        theirs, ours = results
        ends = Counter(record.stop_cause for record in [*(ours.trace or ()), *(theirs.trace or ())])
        causes += ends
        assert [facts(r) for r in ours.trace or ()] == [facts(r) for r in theirs.trace or ()], name
        assert ours.new_tokens == theirs.new_tokens
        assert ours.stop_reason == theirs.stop_reason
        assert ours.stats.etpl == theirs.stats.etpl
        eagerly = "pacer" in name or name.startswith("copy")  # one looks back at the text, the other copies it
        assert ours.stats.runner == ("eager" if eagerly else "captured")
        assert theirs.stats.runner == "eager"
    assert causes["before_draw"] > 0 or asked.get("do_sample")
    assert causes["eos"] > 0 or "eos_token_id" not in asked


class Positions(NeverStop):
    """Writes down which rows it is asked about."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def stop_before_draw(self, row: DraftRow) -> bool:
        self.seen.append((row.position, row.num_drafted))
        return False


def test_a_policy_is_told_where_a_row_is(llama64: LlamaForCausalLM) -> None:
    seen = []
    for engine in pair(llama64):
        stopping = Positions()
        policy = Policy(ScriptedExit([(2, 3)]), stopping)
        result = engine.generate(PROMPT, max_new_tokens=12, policy=policy, trace=True)
        rows = [(r.num_committed_before - 1 + j, j) for r in result.trace or () for j in range(r.num_drafted)]
        assert stopping.seen == rows
        seen.append(rows)
    assert seen[0] == seen[1] != []


def test_no_layer_runs_twice_but_for_what_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by range of layers, as launched: one pass each, and one more through [0, E) for every dropped token."""
    ran: Counter[tuple[int, int]] = Counter()
    layers = StaticPass.layers

    def counted(self: StaticPass, start: int, stop: int, *rest: Any) -> None:
        rows = range(int(self.base + self.first), int(self.base + self.last) + 1)
        ran.update((layer, row) for layer in range(start, stop) for row in rows)
        layers(self, start, stop, *rest)

    monkeypatch.setattr(StaticPass, "layers", counted)
    llama = tiny_llama(late_scale=0.2, seed=3)
    _, captured = pair(llama)
    for stopping in (None, StopBelow(0.4)):
        ran.clear()
        policy = Policy(ScriptedExit([(2, 3)]), stopping)
        result = captured.generate(PROMPT, max_new_tokens=30, policy=policy, trace=True)
        expected: Counter[tuple[int, int]] = Counter()
        for record in result.trace or ():
            first = record.num_committed_before - 1
            for row in range(first, first + record.num_drafted + 1):
                expected.update((layer, row) for layer in range(4))
        extra = ran - expected
        assert not expected - ran
        assert result.stats.num_discarded_rows == sum(extra.values()) / 2
        assert (result.stats.num_discarded_rows > 0) is (stopping is not None)


# What is captured, and when


def test_nothing_is_captured_per_length_or_after_warming_up() -> None:
    model = from_transformers(tiny_llama(num_layers=6, seed=3), layout="plain")
    engine = SelfSpecGenerator(model, policy="auto:cost=layers", runner="captured")
    count, seconds = engine.warm_up(max_length=64)
    assert count > 0
    assert seconds > 0
    for prompt in ([1], [1, 2, 3] * 8):
        stats = engine.generate(prompt, max_new_tokens=40).stats
        assert (stats.num_captures, stats.capture_seconds) == (0, 0.0)
        assert stats.rounds > 3
    assert engine.warm_up(max_length=64)[0] == 0
    again = SelfSpecGenerator(model, policy="ls:2-3", runner="captured")
    first = again.generate([1], max_new_tokens=40).stats
    assert 0 < first.capture_seconds < first.seconds
    second = again.generate([1], max_new_tokens=40)
    assert second.stats.num_captures == 0
    assert "captures" not in "".join(summary_lines(second, "length"))
    told = summary_lines(replace(second, stats=first), "length")[-1]
    assert told.endswith(f"for {first.num_captures} captures, which last")
    assert SelfSpecGenerator(model, runner="eager").warm_up("ar") == (0, 0.0)


class AsItComes:
    """Captured work that runs its body at every replay: captures by the thousand cost nothing."""

    def __init__(self, body: Callable[[], object]) -> None:
        self.replay = body


def test_warming_up_a_deep_model_for_long_texts_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 layers, every exit layer, texts of 32,768 tokens, with learning: thousands of captures, all of them kept."""
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.capture, "RecordedOperations", AsItComes)
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.runner, "SMALLEST_SPAN", 256)
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.buffers, "BLOCK", 8)
    llama = tiny_llama(num_layers=80, head_dim=2, max_position_embeddings=1 << 15, seed=3)
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), runner="captured")
    policy = parse_policy("auto:cost=layers", num_layers=80)
    made, _ = engine.warm_up(policy, exit_layers=range(1, 80), max_length=1 << 15)
    assert made > 5 * MAX_CAPTURES
    assert engine.warm_up(policy, exit_layers=range(1, 80), max_length=1 << 15)[0] == 0
    stats = engine.generate([1, 2, 3] * 200, max_new_tokens=20, policy=policy).stats
    assert stats.rounds > 0
    assert stats.num_captures == 0


def test_two_threads_never_capture_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch allows one capture at a time in a process."""
    inside, most = [0], [0]

    class Watched(RecordedOperations):
        def __init__(self, body: Callable[[], object]) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            sleep(0.001)  # another thread's turn
            super().__init__(body)
            inside[0] -= 1

    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.capture, "RecordedOperations", Watched)
    engines = [
        SelfSpecGenerator(from_transformers(tiny_llama(seed=3), layout="plain"), runner="captured") for _ in "ab"
    ]
    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(lambda e: e.generate(PROMPT, max_new_tokens=12, policy="ls:2-3").new_tokens, engines))
    assert texts[0] == texts[1]
    assert most == [1]


def test_ranges_of_layers_are_shared() -> None:
    """6 layers in blocks of 2. Plain steps capture [0, 2), [2, 4), [4, 6); exit layer 4 drafts with the first two of them
    and adds [4, 6) for several rows; exit layer 3 adds [2, 3), and for several rows [3, 4)."""
    model = from_transformers(tiny_llama(num_layers=6, seed=3), layout="plain")
    engine = SelfSpecGenerator(model, runner="captured")
    captures = [
        engine.generate([1], max_new_tokens=6, policy=policy).stats.num_captures
        for policy in ("ar", "ls:4-1", "ls:3-1", "ls:2-1")
    ]
    # ar: three ranges and the judgement; 4: one range, the look, a judgement of two rows; 2: [2, 4) for two rows.
    # Each first text also ends with a round of a plain step or one row, which are there by then.
    assert captures == [4, 3, 2, 1]


def test_a_text_that_outgrows_the_cache_captures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.runner, "SMALLEST_CACHE", 16)
    llama = tiny_llama(dtype=torch.float64, seed=3)
    engine, expected = pair(llama)[1], reference_greedy(llama, PROMPT, max_new_tokens=40)
    for length, captures in ((12, True), (8, False), (40, True), (30, False)):
        result = engine.generate(PROMPT, max_new_tokens=length, policy="ls:2-2")
        assert result.new_tokens == expected[:length]
        assert (result.stats.num_captures > 4) is captures  # the last round may be shorter than any before


def test_the_cache_of_captures_grows_by_powers_of_two() -> None:
    assert captured_length(100, 8192) == 4096
    assert captured_length(4097, 8192) == 8192
    assert captured_length(5000, 6000) == 6000
    assert captured_length(100, 64) == 100


def test_few_captures_at_a_time_and_the_same_text(
    llama64: LlamaForCausalLM, text64: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Captures.__init__, "__kwdefaults__", {"max_captures": 2})
    engine = pair(llama64)[1]
    policy = Policy(ScriptedExit([(1, 3), (None, 0), (3, 1)]), StopBelow(0.3))
    result = engine.generate(PROMPT, max_new_tokens=25, policy=policy)
    assert result.new_tokens == text64[:25]
    assert result.stats.num_captures > 20


def test_a_longer_draft_than_ever_gets_larger_buffers(llama64: LlamaForCausalLM, text64: list[int]) -> None:
    engine = pair(llama64)[1]
    for policy in ("ls:2-2", "ls:2-20", "ls:2-2"):
        assert engine.generate(PROMPT, max_new_tokens=30, policy=policy).new_tokens == text64


# Failures


class NotANumber(LogitsProcessor):
    """NaN from a length on."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * torch.nan if input_ids.shape[1] >= self.length else scores


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("policy", ["ar", "ls:2-3", "dv:2"])
def test_no_distribution_is_an_error_and_the_next_text_is_right(
    policy: str, do_sample: bool, llama64: LlamaForCausalLM, text64: list[int]
) -> None:
    engine = pair(llama64)[1]
    with pytest.raises(NonFiniteLogitsError):
        engine.generate(
            PROMPT, max_new_tokens=20, policy=policy, do_sample=do_sample, seed=1,
            logits_processor=LogitsProcessorList([NotANumber(9)]),
        )  # fmt: skip
    assert engine.generate(PROMPT, max_new_tokens=20, policy=policy).new_tokens == text64[:20]


def test_what_is_left_of_numbers_that_were_none_is_cleared(llama64: LlamaForCausalLM) -> None:
    """A masked position is multiplied by 0, which leaves NaN a NaN."""
    model = from_transformers(llama64, layout="plain")
    cache = KVCache(model, 64)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    with torch.inference_mode():
        runner = selfspec.engine.runners.cuda_graph.runner.CudaGraphRunner(model, cache)
        runner._pass.place(0, 2, 10)
        runner._pass.layers(1, 4, 2, 16, None)
        assert runner._pass.hidden.isfinite().all()


def test_another_runner_is_refused(llama64: LlamaForCausalLM) -> None:
    model = from_transformers(llama64, layout="plain")
    with pytest.raises(ValueError, match="runner must be one of auto, eager, captured, got 'fast'"):
        SelfSpecGenerator(model, runner="fast")  # type: ignore[arg-type]
    assert SelfSpecGenerator(model).runner == "eager"


def test_calibration_times_the_runner_in_use() -> None:
    model = from_transformers(tiny_llama(seed=1), layout="plain")
    cost = measured_cost(model, "captured")
    assert len(cost.layer_seconds) == len(cost.head_seconds) == 13
    assert cost.description.endswith("captured")
    assert measured_cost(model, "captured") is cost
    assert measured_cost(model).description != cost.description


def test_full_logits_agree_with_a_static_pass(llama64: LlamaForCausalLM) -> None:
    """Rows in any order of launching, at positions on the device, over a span longer than the text."""
    model: LayerSkipModel = from_transformers(llama64, layout="plain")
    cache = KVCache(model, 32)
    cache.keys.zero_()
    cache.values.zero_()
    forward = StaticForward(model, cache)
    text = [3, 8, 1, 0, 22, 5]
    with torch.inference_mode():
        hidden = model.embed(torch.tensor(text))
        states = [forward.run(hidden[:4], 0, 4, torch.arange(4), 16)]
        states += [forward.run(hidden[i : i + 1], 0, 4, torch.tensor([i]), span) for i, span in ((4, 8), (5, 32))]
        logits = model.logits(torch.cat(states))
    torch.testing.assert_close(logits, full_logits(llama64, text), rtol=0, atol=1e-5)
