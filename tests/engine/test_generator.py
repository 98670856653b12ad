"""`generate` as a whole: statistics that add up, streaming, seeds, failures in the middle, models that are shared."""

from __future__ import annotations

from dataclasses import replace
from time import sleep

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from callbacks import Recorder
from layerskip_models import LayerSkipModel, from_transformers
from policies import MeasuredCost, Policy
from scripted_policies import ScriptedExit, StopAtTokens, StopBelow
from selfspec import SelfSpecGenerator
from tiny_llama import reference_greedy, request_for, tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7]
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(num_layers=NUM_LAYERS, dtype=torch.float64, late_scale=0.6, seed=3)


@pytest.fixture
def engine(llama: LlamaForCausalLM) -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(llama, layout="plain"))


POLICIES: dict[str, Policy | str] = {
    **{name: name for name in ("ar", "ls:1-4", "ls:3-2")},
    "before": Policy(ScriptedExit([(1, 5)]), StopBelow(0.5)),
    "after": Policy(ScriptedExit([(2, 5), (None, 0)]), StopAtTokens(range(12))),
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("budget", [1, 2, 7, 30])
def test_statistics_add_up(engine: SelfSpecGenerator, policy: Policy | str, do_sample: bool, budget: int) -> None:
    streamed = Recorder()
    options = {"do_sample": do_sample, "seed": 2, "eos_token_id": [0, 20], "trace": True, "streamer": streamed}
    result = engine.generate(PROMPT, max_new_tokens=budget, policy=policy, **options)
    stats, trace = result.stats, result.trace
    assert trace is not None
    assert streamed.pieces[0] == PROMPT
    assert [token for piece in streamed.pieces[1:] for token in piece] == result.new_tokens
    assert all(streamed.pieces) and tuple(streamed.records) == trace and streamed.ends == 1
    assert result.sequences.shape == (1, len(PROMPT) + stats.num_new_tokens)
    assert result.sequences[0].tolist() == PROMPT + result.new_tokens
    assert result.new_tokens[1:] == [token for record in trace for token in record.tokens]
    assert stats.num_prompt_tokens == len(PROMPT)
    assert stats.rounds == len(trace)
    assert stats.loaded_layers == sum(record.loaded_layers for record in trace)
    assert stats.preverifier_layers == 0 < stats.prefill_seconds
    counted = [record.counted_drafts for record in trace]
    assert (stats.num_drafted, stats.num_accepted) == (sum(d for d, _ in counted), sum(a for _, a in counted))
    for index, record in enumerate(trace):
        assert record.index == index
        assert record.num_committed_before == len(PROMPT) + 1 + sum(len(r.tokens) for r in trace[:index])
        last = index == len(trace) - 1
        expected = record.draft_tokens[: record.num_accepted]
        assert record.tokens[: record.num_accepted] == expected[: len(record.tokens)]
        assert len(record.tokens) == record.num_accepted + 1 or (last and len(record.tokens) <= record.num_accepted)
    if not stats.rounds:
        assert stats.tokens_per_round is stats.etpl is stats.decode_tokens_per_second is None
        return
    round_tokens = stats.num_new_tokens - 1
    assert stats.tokens_per_round == round_tokens / stats.rounds
    assert stats.etpl == round_tokens / stats.loaded_layers
    rates = (
        (stats.num_accepted / stats.num_drafted, stats.num_accepted / stats.rounds)
        if stats.num_drafted
        else (None,) * 2
    )
    assert (stats.acceptance_rate, stats.accepted_per_round) == rates
    if policy == "ar":
        assert stats.etpl == 1 / NUM_LAYERS
        assert stats.num_drafted == 0
    assert 0 < stats.time_to_first_token <= stats.seconds
    phases = ("calibration", "prefill", "draft", "verify", "accept", "learn", "other")
    assert sum(getattr(stats, f"{phase}_seconds") for phase in phases) == pytest.approx(stats.seconds)
    decoding_seconds = stats.seconds - stats.calibration_seconds
    assert stats.tokens_per_second == pytest.approx(stats.num_new_tokens / decoding_seconds)


def test_calibration_is_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first call of a policy does before it decodes is not in its tokens per second."""
    wait = 0.25

    def calibrate(model: LayerSkipModel, runner: str, bits: tuple[int, ...]) -> MeasuredCost:
        sleep(wait)
        return MeasuredCost(num_layers=model.num_layers, layer_seconds=(1e-3, 1e-3), head_seconds=(1e-3, 1e-3))

    monkeypatch.setattr("selfspec.engine.policy_store.expected_cost", calibrate)
    generator = SelfSpecGenerator(from_transformers(tiny_llama(num_layers=NUM_LAYERS, seed=5)))
    first, second = (generator.generate([1, 2, 3], max_new_tokens=8).stats for _ in range(2))
    assert first.calibration_seconds >= wait > second.calibration_seconds
    assert first.seconds >= wait + first.other_seconds
    assert first.tokens_per_second == pytest.approx(8 / (first.seconds - first.calibration_seconds))
    assert first.time_to_first_token > wait


def test_accepted_drafts_behind_a_stop_string_count_nowhere(llama: LlamaForCausalLM) -> None:
    engine = SelfSpecGenerator(from_transformers(llama, layout="plain"), tiny_tokenizer())
    free = reference_greedy(llama, PROMPT, max_new_tokens=30)
    cut = 0
    for position in range(1, 25):
        string = tiny_tokenizer().decode(free[position : position + 2])
        result = engine.generate(PROMPT, max_new_tokens=30, stop_strings=string, policy="ls:3-6", trace=True)
        *before, last = result.trace or (None,)
        if last is not None and len(last.tokens) <= last.num_accepted:
            cut += 1
            assert result.stats.num_drafted == sum(record.num_drafted for record in before) + len(last.tokens)
    assert cut > 0


def test_a_streamer_that_raises_leaves_the_generator_usable(llama: LlamaForCausalLM, engine: SelfSpecGenerator) -> None:
    class Breaking(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.pieces) == 3:
                raise BrokenPipeError

    breaking = Breaking()
    with pytest.raises(BrokenPipeError):
        engine.generate(PROMPT, max_new_tokens=25, streamer=breaking)
    assert breaking.ends == 1
    assert engine.generate(PROMPT, max_new_tokens=25).new_tokens == reference_greedy(llama, PROMPT, max_new_tokens=25)


def test_how_a_call_chooses_its_policy(engine: SelfSpecGenerator) -> None:
    for options, name in (
        ({}, "auto"),
        ({"policy": "ar"}, "ar"),
        ({"exit_layer": 3}, "ls:3-4"),  # of a checkpoint without a setting: a quarter of the layers, 4 drafts
        ({"num_speculations": 2}, "ls:1-2"),
        ({"exit_layer": 2, "num_speculations": 6}, "ls:2-6"),
        ({"num_speculations": 0}, "ar"),
        ({"num_speculations": 0, "exit_layer": 2}, "ar"),
        ({"num_speculations": 0, "policy": "ls:2-6"}, "ar"),
    ):
        assert engine.generate(PROMPT, max_new_tokens=3, **options).policy == name
    own = SelfSpecGenerator(engine.model, policy="ls:3-1")
    assert own.generate(PROMPT, max_new_tokens=3).policy == "ls:3-1"


def test_a_text_with_a_token_that_the_model_lacks_is_refused() -> None:
    """The tokenizer of another model, or one with added tokens: the text would end all that share its passes."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    generator = SelfSpecGenerator(from_transformers(tiny_llama()), tokenizer)
    with generator.engine() as engine:
        engine.add("ab", max_new_tokens=4, policy="ar")
        for options in (
            {"prompt": "ab<new>"},
            {"messages": [{"role": "user", "content": "ab<new>"}]},
            {"prompt": "ab", "policy": "copy:3", "copy_from": ["ab<new>"]},
        ):
            with pytest.raises(ValueError, match=r"24"):
                engine.add(**options, max_new_tokens=4)
        results = [progress.result for _ in range(4) for progress in engine.step()]
        assert results[-1] is not None
    with pytest.raises(
        ValueError, match=r"tokenizer's ids must be in \[0, 23\].* got 24: is it this model's tokenizer"
    ):
        generator.generate_batch(["ab", "<new>"], max_new_tokens=4)
    request = request_for(generator.model, [5, 1], max_new_tokens=4)
    with pytest.raises(ValueError, match="got 24"):
        generator.check_prepared([replace(request, prompt=torch.tensor([24]))])
