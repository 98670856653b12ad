"""Penalties and biases of logits, by hand."""

import pytest
import torch

from selfspec.serve.bias_processors import BiasProcessor, PenaltyProcessor


def test_penalties_count_generated_tokens_only() -> None:
    processor = PenaltyProcessor(presence=0.5, frequency=0.25, prompt_length=2)
    ids = torch.tensor([[3, 3, 1, 2, 1]])  # generated: 1, 2, 1
    scores = torch.zeros(1, 4)
    # 1 came twice: 0.5 + 2 * 0.25; 2 came once: 0.5 + 0.25; 3 stands in the prompt only.
    assert processor(ids, scores).tolist() == [[0.0, -1.0, -0.75, 0.0]]
    assert scores.tolist() == [[0.0] * 4], "a pure function"
    assert processor(ids[:, :2], scores) is scores


def test_bias_is_added_and_ids_are_checked() -> None:
    processor = BiasProcessor({"1": -100, "3": 2.5}, 4, torch.device("cpu"))
    assert processor(torch.tensor([[0]]), torch.ones(1, 4)).tolist() == [[1.0, -99.0, 1.0, 3.5]]
    for wrong in ("4", "-1", "x", "1.0", "²"):
        with pytest.raises(ValueError, match=r"\[0, 3\]"):
            BiasProcessor({wrong: 1.0}, 4, torch.device("cpu"))
