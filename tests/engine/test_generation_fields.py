"""Every field of a GenerationConfig: `generate` follows it as transformers does, or refuses it by name."""

from __future__ import annotations

import ast
import inspect
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from selfspec import SelfSpecGenerator
from selfspec.engine import request
from selfspec.engine.request import counts_its_calls
from tiny_llama import tiny_llama, tiny_tokenizer

PROMPT = [5, 1, 7, 5, 1]
FOLLOWED: dict[str, list[Any]] = {
    "max_length": [9],
    "max_new_tokens": [3],
    "min_length": [14],
    "min_new_tokens": [9],
    "max_time": [1e-9],
    "stop_strings": [["a", "b", "c"]],
    "repetition_penalty": [1.7, 0.6],
    "encoder_repetition_penalty": [3.0],
    "no_repeat_ngram_size": [1, 2],
    "encoder_no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [[[i] for i in range(9)], [[5, 1], [3]]],
    "renormalize_logits": [True],
    "forced_bos_token_id": [4],
    "forced_eos_token_id": [4],
    "remove_invalid_values": [True],
    "exponential_decay_length_penalty": [(2, 1.5)],
    "suppress_tokens": [[*range(10)], np.arange(10)],
    "begin_suppress_tokens": [[*range(16)]],
    "sequence_bias": [[[[3], 9.0]], [[[5, 1], 4.0]]],
    "watermarking_config": [WatermarkingConfig(bias=4.0)],
    "eos_token_id": [list(range(6))],
    "return_dict_in_generate": [True],
}
REFUSED: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), 2),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "guidance_scale"), 2),
    **dict.fromkeys(("use_mtp", "is_assistant", "token_healing", "output_attentions", "output_hidden_states"), True),
    **dict.fromkeys(("output_scores", "output_logits"), True),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), 0.5),
    "dola_layers": ["low"],
    "constraints": ["x"],
    "force_words_ids": [[1]],
}
SAMPLED = "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff"
WITHOUT_EFFECT = """early_stopping length_penalty decoder_start_token_id num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold max_matching_ngram_size assistant_lookbehind target_lookbehind assistant_ensemble_weight
    speculation_type cache_config max_cache_len compile_config disable_compile continuous_batching_config low_memory
    prefill_chunk_size use_cache cache_implementation pad_token_id bos_token_id _from_model_config _commit_hash
    transformers_version"""
followed = pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in FOLLOWED.items() for v in values])


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama(dtype=torch.float64, seed=4)


@pytest.mark.filterwarnings("ignore")
@followed
def test_followed_as_transformers_does(field: str, value: Any, llama: LlamaForCausalLM) -> None:
    tokenizer = tiny_tokenizer()
    llama.generation_config.eos_token_id = 2 if field in ("min_length", "min_new_tokens") else None
    fields: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 16, field: value}
    if field == "max_length":
        del fields["max_new_tokens"]
    if field == "exponential_decay_length_penalty":
        fields["eos_token_id"] = 2
    config = GenerationConfig(**fields)
    ids = torch.tensor([PROMPT])
    expected: Any = llama.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, tokenizer=tokenizer
    )
    expected = expected.sequences if field == "return_dict_in_generate" else expected
    engine = SelfSpecGenerator(llama, tokenizer)
    for policy in ("ls:2-4", "ar"):
        found = engine.generate(PROMPT, generation_config=config, policy=policy).new_tokens
        assert PROMPT + found == expected[0].tolist(), policy


class Own(LogitsProcessor, StoppingCriteria):  # type: ignore[misc]
    """A caller's own."""


TIMED = GenerationConfig(max_time=3.0)
USUAL: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
    {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.0, "generation_config": TIMED},
    {"stop_strings": "a", "generation_config": TIMED, "eos_token_id": [2, 3], "stopping_criteria": [own := Own(), own]},
    {"do_sample": True, "repetition_penalty": 0.8, "logits_processor": [own, own]},
    {"repetition_penalty": 0.8, "logits_processor": [logits_process.RepetitionPenaltyLogitsProcessor(1.5), own]},
    {"generation_config": GenerationConfig(bad_words_ids=[[3]], no_repeat_ngram_size=2, max_new_tokens=3)},
    {"generation_config": GenerationConfig(do_sample=True, top_h=0.5, typical_p=0.5, output_attentions=False)},
)


@pytest.mark.parametrize("options", USUAL)
def test_processors_and_criteria_are_those_that_transformers_makes(
    options: dict[str, Any], llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> list[Any]:
        call = SelfSpecGenerator(llama, tokenizer).check(PROMPT, **options).request
        return [
            (type(one), one if type(one) is Own else repr(vars(one)))
            for one in (*call.processors, *call.stops.criteria)
        ]

    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    found = made()
    monkeypatch.setattr(request, "usual_lists", lambda *call: None)
    assert found == made()


@pytest.mark.parametrize(("field", "value"), REFUSED.items())
def test_refused_by_name(field: str, value: Any, llama: LlamaForCausalLM) -> None:
    engine = SelfSpecGenerator(llama)
    with pytest.raises(ValueError, match=rf"{field}=.* does not apply"):
        engine.generate(PROMPT, generation_config=GenerationConfig(do_sample=True, **{field: value}), max_new_tokens=3)


def test_options_in_the_configuration_of_the_model_are_refused() -> None:
    """As transformers refuses them."""
    llama = tiny_llama()
    llama.config.top_k = 3
    with pytest.raises(ValueError, match=r"'top_k': 3.*set it in its generation_config"):
        SelfSpecGenerator(llama).generate(PROMPT)


def test_there_is_no_other_field() -> None:
    known = {*FOLLOWED, *REFUSED, *SAMPLED.split(), *WITHOUT_EFFECT.split()}
    assert set(vars(GenerationConfig())) - known == set()


def test_processors_that_keep_a_state_are_refused() -> None:
    llama = tiny_llama()
    engine = SelfSpecGenerator(llama)
    config = GenerationConfig(do_sample=True, watermarking_config=SynthIDTextWatermarkingConfig(2, keys=[1, 2]))
    for call, prompt in ((engine.generate, PROMPT), (engine.generate_batch, [PROMPT, PROMPT])):
        with pytest.raises(ValueError, match="SynthIDTextWatermarkLogitsProcessor keeps a state"):
            call(prompt, generation_config=config, max_new_tokens=3)
    own = LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, llama)])
    with pytest.raises(ValueError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor keeps a state"):
        engine.generate(PROMPT, logits_processor=own, max_new_tokens=3)


def test_no_other_processor_of_transformers_writes_to_itself() -> None:
    """In any method but those that set it up."""
    setting_up = {"__init__", "set_begin_index", "set_inputs", "set_model"}
    once = {"RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "ExponentialDecayLengthPenalty"}
    tree = ast.parse(Path(inspect.getfile(logits_process)).read_text(encoding="utf-8"))
    stateful = set()
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for method in (node for node in kind.body if isinstance(node, ast.FunctionDef)):
            places = (n for n in ast.walk(method) if isinstance(n, (ast.Attribute, ast.Subscript)))
            stores = (n for n in places if isinstance(n.ctx, ast.Store))
            if method.name not in setting_up and any(ast.unparse(n).startswith("self.") for n in stores):
                stateful.add(kind.name)
    named = {kind.__name__ for kind in counts_its_calls()}
    assert named <= stateful
    assert stateful - named - once == {"WhisperNoSpeechDetection"}  # of speech; once: arguments brought to their form
