"""`model.generate(custom_generate=...)` gives what plain `model.generate` gives, for every option that it does not refuse."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import selfspec
from layerskip_models.families import IN_TRANSFORMERS
from layerskip_models.transformers_names import with_cache
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.integrations.custom_generate import SelfSpecOutput, _generators, generator_of
from tests.adverse.fuzz_cases import make_model, processing_options
from tiny_llama import tiny_llama


class BanByRow(LogitsProcessor):
    """Bans another token in every row of the batch, and looks at the text as the batch has it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row in range(scores.shape[0]):
            scores[row, (row * 5 + input_ids.shape[1] + int(input_ids[row, 0])) % scores.shape[1]] = -torch.inf
        return scores


class StopByRow(StoppingCriteria):
    """Ends row r where a token that depends on r comes."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 7 == torch.arange(input_ids.shape[0]) + input_ids[:, 0] % 4


def inputs(*texts: list[int], pad: int = 0) -> dict[str, Any]:
    """Left-padded prompts for `generate`, greedy."""
    width = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(text)) + text for text in texts]),
        "attention_mask": torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts]),
        "do_sample": False,
        "pad_token_id": pad,
    }


MORE: list[dict[str, Any]] = [
    {"eos_token_id": [3, 5, 6, 8, 9, 11, 14]}, {"stop_strings": "ab"}, {"stop_strings": ["fig", "ba", "d"]},
    {"num_return_sequences": 2}, {"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2},
    {"watermarking_config": WatermarkingConfig(bias=1.5)},
]  # fmt: skip


def drawn(random: Random, vocab_size: int) -> dict[str, Any]:
    """Arguments of `model.generate`: prompts that are padded on the left, and options."""
    lengths, budget = random.choices([2, 3, 9, 14], k=random.randint(1, 3)), random.randint(1, 12)
    prompts = [random.choices(range(vocab_size), k=length // 2) * 2 for length in lengths]
    arguments = {**inputs(*prompts, pad=random.randrange(vocab_size)), "max_new_tokens": budget}
    if random.random() < 0.6:
        arguments |= processing_options(random, vocab_size, budget, prompts[0])
    if random.random() < 0.5:
        arguments |= random.choice(MORE)
    if random.random() < 0.5:
        for name in ("eos_token_id", "exponential_decay_length_penalty"):
            arguments.pop(name, None)
    if "num_return_sequences" in arguments:  # greedy decoding has only one: draw from the best token alone
        arguments |= {"do_sample": True, "top_k": 1}
        arguments.pop("remove_invalid_values", None)  # where all tokens are masked, all would be the best
    if random.random() < 0.3:
        arguments["logits_processor"] = LogitsProcessorList([BanByRow()])
    if random.random() < 0.3:
        arguments["stopping_criteria"] = StoppingCriteriaList([StopByRow()])
    if random.random() < 0.25:
        arguments["prefix_allowed_tokens_fn"] = lambda row, text: [
            token for token in range(vocab_size) if (token + row + len(text)) % 5
        ]
    return arguments


def outcome(call: Callable[[], Any]) -> Tensor | str:
    try:
        found = call()
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        return type(error).__name__
    assert isinstance(found, Tensor)
    return found


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")
@pytest.mark.parametrize("examples", [40, pytest.param(3000, marks=pytest.mark.slow)])
def test_equals_plain_generate(examples: int) -> None:
    """In float64, over models, left-padded batches, options, processors, criteria and policies."""
    count: Counter[str] = Counter()
    for number in range(examples):
        random = Random(f"call {number}")
        if number % 4 == 0:
            model = make_model(Random(f"model {number}"), [torch.float64], [24, 50], IN_TRANSFORMERS)
        arguments, layer = drawn(random, model.vocab_size), random.randrange(1, model.num_layers)
        call = partial(model.reference.generate, **arguments)
        expected = outcome(partial(call, tokenizer=model.tokenizer))
        policy = named_policy(random.choice(EVERY_POLICY), layer, model.engine.model)
        found = outcome(partial(call, custom_generate=selfspec.custom_generate(policy, tokenizer=model.tokenizer)))
        if isinstance(expected, str):
            # transformers may also break off on the masked scores of a row that has ended.
            assert isinstance(found, str) or expected == "RuntimeError", expected
            count["transformers raises"] += 1
            continue
        if found == "NonFiniteLogitsError":  # transformers goes on with token 0
            scored: Any = call(tokenizer=model.tokenizer, output_scores=True, return_dict_in_generate=True)
            assert any(bool(scores.isnan().any()) for scores in scored.scores)
            count["NaN"] += 1
            continue
        assert isinstance(found, Tensor), (number, found)
        assert found.dtype == expected.dtype and torch.equal(found, expected), (number, found, expected)
        count["equal"] += 1
        count["padded"] += not bool(arguments["attention_mask"].all())
        new = found[:, arguments["input_ids"].shape[1] :]
        ended = (new[:, -2:] == arguments["pad_token_id"]).all(dim=1).any()
        count["stopped early"] += new.shape[1] < arguments["max_new_tokens"] or bool(ended)
        count["without EOS, stopped together"] += (
            found.shape[0] > 1
            and not {"stopping_criteria", "stop_strings"}.isdisjoint(arguments)
            and "eos_token_id" not in arguments
        )
    print(dict(count))
    # Were these rare, the equality above would say little.
    assert count["equal"] >= examples * 0.8
    assert count["padded"] >= examples * 0.2
    assert count["stopped early"] >= examples * 0.08
    assert count["without EOS, stopped together"] >= examples * 0.05


class Puts(BaseStreamer):
    """Keeps what it is given, and None for its end."""

    def __init__(self) -> None:
        self.values: list[list[Any] | None] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append(None)


def test_a_streamer_gets_what_plain_generate_gives_it_and_its_end(llama64: LlamaForCausalLM) -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("broken")

    expected, found = Puts(), Puts()
    llama64.generate(**inputs([5, 1, 7]), max_new_tokens=12, streamer=expected)
    ours = selfspec.custom_generate("ls:2-4")
    llama64.generate(**inputs([5, 1, 7]), max_new_tokens=12, custom_generate=ours, streamer=found)
    assert found.values == expected.values and found.values.count(None) == 1
    options: dict[str, Any] = {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([broken])}
    with pytest.raises(RuntimeError, match="broken"):
        llama64.generate(**inputs([5]), custom_generate=ours, streamer=found, **options)
    assert found.values.count(None) == 2


def test_the_statistics_are_in_the_output(llama64: LlamaForCausalLM) -> None:
    arguments = {**inputs([5, 1, 7], [9]), "max_new_tokens": 12}
    ours = selfspec.custom_generate(exit_layer=2, num_speculations=3)
    out = llama64.generate(**arguments, return_dict_in_generate=True, custom_generate=ours)
    assert isinstance(out, SelfSpecOutput)
    assert torch.equal(out.sequences, llama64.generate(**arguments))
    assert isinstance(out.stats, list)  # a pipeline takes a tuple for one of tensors
    assert [(stats.num_prompt_tokens, stats.num_new_tokens) for stats in out.stats] == [(3, 12), (1, 12)]
    assert all(set(stats.rounds_by_exit_layer) <= {0, 2} and stats.num_drafted for stats in out.stats)
    assert {name: value for name, value in vars(out).items() if value is not None}.keys() == {"sequences", "stats"}
    assert not out.sequences.is_inference()  # a training loop may go on with it


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"assistant_model": "itself"}, "assistant_model"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"use_cache": False}, "use_cache=False"),
        (with_cache(tiny_llama(), DynamicCache()), "^(cache|past_key_values) does not apply"),
        ({"inputs_embeds": torch.zeros(1, 2, 16, dtype=torch.float64), "input_ids": None}, "inputs_embeds"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2])}, "SynthID"),
        ({"attention_mask": torch.tensor([[1, 0]])}, "padded on the left"),
        ({"attention_mask": torch.tensor([[0, 0]])}, "nothing but padding"),
        ({"position_ids": torch.tensor([[3, 4]])}, "position_ids"),
        ({"max_new_tokens": 63}, "context"),
        ({"stop_strings": "a"}, r"custom_generate\(tokenizer="),
        ({"policy": "ls:9-2"}, "exit_layer"),
        ({**inputs([5, 1], [6]), "streamer": Puts()}, "one row at a time"),
    ],
)  # fmt: skip
def test_what_does_not_apply_is_refused_by_name(options: dict[str, Any], named: str, llama64: LlamaForCausalLM) -> None:
    if "assistant_model" in options:
        options = {"assistant_model": llama64}
    ours = selfspec.custom_generate("ls:2-3")
    with pytest.raises(ValueError, match=named):
        llama64.generate(**{**inputs([5, 1]), "max_new_tokens": 4, "custom_generate": ours, **options})


def test_the_seed_is_pytorchs(llama64: LlamaForCausalLM, engine64: SelfSpecGenerator) -> None:
    """`torch.manual_seed` before a call makes it repeatable. Each row has a seed of its own; a greedy call draws none."""
    prompts, ours = ([5, 1], [5, 1], [6]), selfspec.custom_generate("ls:2-3")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_k": 5}
    sampled = {**inputs(*prompts), **options, "custom_generate": ours}
    torch.manual_seed(1)
    seeds = torch.randint(2**63 - 1, (3,)).tolist()
    torch.manual_seed(1)
    first, second = llama64.generate(**sampled), llama64.generate(**sampled)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    llama64.generate(**inputs([5, 1]), max_new_tokens=3, custom_generate=ours)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(llama64.generate(**sampled), first) and not torch.equal(first, second)
    for row, prompt, seed in zip(first, prompts, seeds):  # `tests/law` is of these texts
        assert row[2:].tolist() == engine64.generate(prompt, policy="ls:2-3", seed=seed, **options).new_tokens


def test_weights_that_change_are_used_and_a_freed_model_is_freed() -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    ours = selfspec.custom_generate("ls:2-3")
    arguments = {**inputs([5, 1, 7]), "max_new_tokens": 20}
    first = llama.generate(**arguments, custom_generate=ours)
    generator = generator_of(llama)
    with torch.no_grad():
        llama.model.layers[3].mlp.down_proj.weight.mul_(-3)
    changed = llama.generate(**arguments, custom_generate=ours)
    assert torch.equal(changed, llama.generate(**arguments))
    assert not torch.equal(changed, first)
    assert generator_of(llama) is generator  # with what its policies have learned
    copy.deepcopy(llama)  # nothing was put into the model that could not be copied or saved
    gc.collect()  # models of other tests, which would go together with this one
    entries, gone = len(_generators), weakref.ref(llama)
    weight = weakref.ref(llama.model.layers[0].mlp.down_proj.weight)
    del llama, generator
    gc.collect()
    assert gone() is weight() is None
    assert len(_generators) == entries - 1
