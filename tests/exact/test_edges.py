"""Greedy text at the edges of what a call may ask, beside transformers' own: every budget, and the last position."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator
from tiny_llama import reference_greedy


@pytest.mark.parametrize("num_speculations", [0, 1, 3, 9])
def test_every_budget(num_speculations: int, llama64: LlamaForCausalLM) -> None:
    """At every residue of the round: a budget that ends a round early cuts nothing and adds nothing."""
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"))
    expected = reference_greedy(llama64, [5, 1, 7], max_new_tokens=14)
    for exit_layer in (1, 3):
        for budget in range(1, 15):
            result = engine.generate(
                [5, 1, 7], max_new_tokens=budget, exit_layer=exit_layer, num_speculations=num_speculations
            )
            assert (result.new_tokens, result.stop_reason) == (expected[:budget], "length")


def test_the_context_to_its_last_position(llama64: LlamaForCausalLM) -> None:
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"))
    room = llama64.config.max_position_embeddings
    for num_prompt in (1, room - 9, room - 1):
        prompt = [i % 24 for i in range(num_prompt)]
        result = engine.generate(prompt, max_new_tokens=room - num_prompt, exit_layer=2, num_speculations=4)
        assert result.new_tokens == reference_greedy(llama64, prompt, max_new_tokens=room - num_prompt)
