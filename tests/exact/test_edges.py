"""Greedy text at the edges of what a call may ask, beside transformers' own: every budget, and the context's last position.

Also every family with captured passes, which the matrix leaves to this.
"""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from exact_cells import NEW_TOKENS, prompt_of, transformers_text
from layerskip_models import from_transformers
from layerskip_models.families import FAMILIES
from matrix_models import NUM_LAYERS, source_of
from scripted_policies import EVERY_POLICY, first_of_each, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.choice import RunnerName
from tiny_llama import reference_greedy

pytestmark = pytest.mark.usefixtures("small_captures")
every_runner = pytest.mark.parametrize("runner", ["eager", "captured"])
CAPTURED_POLICIES = first_of_each(name for name in EVERY_POLICY if "copy" not in name)


@every_runner
@pytest.mark.parametrize("num_speculations", [0, 1, 3, 9])
def test_every_budget(num_speculations: int, runner: RunnerName, llama64: LlamaForCausalLM) -> None:
    """At every residue of the round: a budget that ends a round early cuts nothing and adds nothing."""
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"), runner=runner)
    expected = reference_greedy(llama64, [5, 1, 7], max_new_tokens=14)
    for exit_layer in (1, 3):
        for budget in range(1, 15):
            result = engine.generate(
                [5, 1, 7], max_new_tokens=budget, exit_layer=exit_layer, num_speculations=num_speculations
            )
            assert (result.new_tokens, result.stop_reason) == (expected[:budget], "length")


@every_runner
def test_the_context_to_its_last_position(runner: RunnerName, llama64: LlamaForCausalLM) -> None:
    engine = SelfSpecGenerator(from_transformers(llama64, layout="plain"), runner=runner)
    room = llama64.config.max_position_embeddings
    for num_prompt in (1, room - 9, room - 1):
        prompt = [i % 24 for i in range(num_prompt)]
        result = engine.generate(prompt, max_new_tokens=room - num_prompt, exit_layer=2, num_speculations=4)
        assert result.new_tokens == reference_greedy(llama64, prompt, max_new_tokens=room - num_prompt)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_passes_of_every_family(family: str) -> None:
    """Some policies each, so that all are met, with a stop inside the text and without one."""
    given = source_of(family, "float64").given
    assert given is not None
    model, index = from_transformers(given, layout="plain"), [*FAMILIES].index(family)
    engine, prompt = SelfSpecGenerator(model, runner="captured"), prompt_of(family, "float64")
    expected = transformers_text(family, "float64", "length")
    for place, name in enumerate(CAPTURED_POLICIES[index % 4 :: 4]):
        policy = named_policy(name, 1 + (index + place) % (NUM_LAYERS - 1), model)
        assert engine.generate(prompt, max_new_tokens=NEW_TOKENS, policy=policy).new_tokens == expected
        stop = expected[5]
        found = engine.generate(prompt, max_new_tokens=NEW_TOKENS, policy=policy, eos_token_id=[stop]).new_tokens
        assert found == expected[: expected.index(stop) + 1]
