import pytest
import torch
from transformers import GenerationConfig

from bench.engines.own import SelfSpecEngine
from bench.engines.peers import (
    generation_settings,
    transformers_early_exit,
    transformers_early_exit_default,
    transformers_generate,
    transformers_static,
)
from tiny_llama import reference_greedy, tiny_llama

PROMPT = [1, 5, 9, 2, 2]


@pytest.fixture
def llama():
    """A model whose own generation config would sample, and stop at once."""
    model = tiny_llama(dtype=torch.float64, seed=3)
    model.generation_config = GenerationConfig(
        eos_token_id=list(range(24)), pad_token_id=0, do_sample=True, temperature=9.0, num_assistant_tokens=1
    )
    return model


@pytest.mark.parametrize(
    "make",
    [
        transformers_generate,
        transformers_static,
        lambda llama: transformers_early_exit(llama, 2, 3),
        lambda llama: transformers_early_exit_default(llama, 2),
    ],
)
def test_every_mode_is_greedy_without_eos_and_leaves_the_model_as_it_was(llama, make, llama64):
    expected = reference_greedy(llama64, PROMPT, max_new_tokens=17)  # the same weights, without EOS
    config = llama.generation_config
    before = config.to_dict()
    generation = make(llama).generate(torch.tensor(PROMPT), 17)
    assert list(generation.tokens) == expected
    assert generation.seconds > 0
    assert generation.time_to_first_token > 0
    assert llama.generation_config is config
    assert config.to_dict() == before
    assert llama.config.num_hidden_layers == 4


def test_fixed_length_drafts_exactly_that_many(llama):
    counts = transformers_early_exit(llama, 2, 3).count(torch.tensor(PROMPT), 20)
    assert counts["tokens_per_round"] == 20 / counts["rounds"]
    assert counts["num_accepted"] < counts["num_drafted"]  # some are rejected, or the threshold would not matter
    # Every round drafts 3 but for the last ones, where fewer tokens than that are left.
    assert 3 * (counts["rounds"] - 1) <= counts["num_drafted"] + 3 <= 3 * (counts["rounds"] + 1)
    default = transformers_early_exit_default(llama, 2).count(torch.tensor(PROMPT), 20)
    assert default["num_drafted"] != counts["num_drafted"]
    assert transformers_generate(llama).count(torch.tensor(PROMPT), 20) is None


def test_settings_are_put_back_after_an_error(llama):
    config = llama.generation_config
    with pytest.raises(KeyError), generation_settings(llama, num_assistant_tokens=7):
        assert llama.generation_config.num_assistant_tokens == 7
        assert llama.generation_config.eos_token_id is None
        raise KeyError
    assert llama.generation_config is config


def test_next_logits_are_those_of_the_last_position(llama, engine64):
    prompt = torch.tensor(PROMPT)
    theirs = transformers_generate(llama).next_logits(prompt)
    assert torch.allclose(theirs, SelfSpecEngine(engine64, "ar").next_logits(prompt), atol=1e-6)
