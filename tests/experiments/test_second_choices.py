"""What second choices would add, replayed: against a tree that is run by hand, and the arithmetic of gain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.datasets import EncodedPrompt
from bench.experiments.__main__ import app
from bench.experiments.leaves.second_choices import LeafRound, leaf_gain, leaf_rounds
from layerskip_models import from_transformers
from layerskip_models.kv_cache import KVCache
from scripted_policies import made_up_cost
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

PROMPT = EncodedPrompt(id="one", task="any", ids=torch.tensor([1, 2, 3, 4, 5]))


def test_says_whether_the_second_choice_was_the_models_token() -> None:
    """Against the exit's logits after each rejected draft's text, computed one by one."""
    model = from_transformers(tiny_llama(num_layers=4, late_scale=0.5, dtype=torch.float64, seed=2), layout="plain")
    generator = SelfSpecGenerator(model, prefix_cache=0)
    cost = made_up_cost(4)
    rounds = leaf_rounds(generator, PROMPT, 40, "spide:1,tau=0.02", cost)
    text = generator.generate(PROMPT.ids, max_new_tokens=40, policy="ar", do_sample=False, eos_token_id=[]).sequences[0]
    done, known = PROMPT.ids.numel() + 1, 0
    for found in rounds:
        if found.rejected is not None:
            prefix = text[: done + found.rejected]
            with torch.inference_mode():
                hidden = model.run_layers(model.embed(prefix), 0, 1, KVCache(model, prefix.numel()))
                second = int(model.draft_logits(hidden[-1:])[0].topk(2).indices[1])
            assert found.second_right == (second == int(text[prefix.numel()]))
            known += 1
        done += found.tokens
    assert known >= 5 and {found.second_right for found in rounds if found.rejected is not None} == {True, False}


def test_gain_by_hand() -> None:
    """3 tokens for 10; a leaf is a row, of 4 layers and a head: the rounds' own costs tell what it is."""
    cost = made_up_cost(4)
    row = cost.copying(0, 1, 1) - cost.copying(0, 0, 0)
    rounds = [
        LeafRound(tokens=2, cost=6.0, exit_layer=2, confidences=(0.9, 0.4), rejected=1, second_right=True),
        LeafRound(tokens=1, cost=4.0, exit_layer=None),
    ]
    more = (row + cost.copying(0, 3, 3) - cost.copying(0, 2, 2)) / 2
    found = leaf_gain(rounds, 0.5, cost)
    assert (found.leaves, found.right) == (0.5, 0.5)
    assert found.gain == pytest.approx(4 / (10 + more) / 0.3 - 1)
    assert leaf_gain(rounds, 0.3, cost).gain == 0.0  # nobody is that unsure
    elsewhere = [LeafRound(tokens=1, cost=6.0, exit_layer=2, confidences=(0.5, 0.4), rejected=0, second_right=True)]
    assert leaf_gain(elsewhere, 0.9, cost).gain < 0  # the leaf stood beside another draft


def test_the_command(checkpoint: Path) -> None:
    arguments = ["leaves", "--costs-of", str(checkpoint), "--num-samples", "1", "--prompt-tokens", "20"]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert "below 0.5" in result.output
    refused = CliRunner().invoke(app, ["leaves", "--policy", "ls:3-4"])
    assert refused.exit_code == 2 and "looks at no confidence" in refused.output
