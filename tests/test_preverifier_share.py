"""Pacer's share of a round, in bytes by hand and in time at all."""

from __future__ import annotations

import pytest
from tiny_llama import tiny_llama
from transformers import LlamaConfig

from bench.machine.preverifier_share import share_of_bytes, share_of_time
from layerskip_models import from_transformers
from layerskip_models.checkpoints.synthetic import SHAPES
from selfspec import SelfSpecGenerator


def test_share_of_bytes_by_hand() -> None:
    """Llama-2-7B, E = 8, 8 drafts in blocks of 4, no context: 2 passes of 202,620,929 beside 96 layers and 9 heads."""
    own, layer, head = 2 * 202_620_929, 4 * 4096**2 + 3 * 4096 * 11008, 4096 * 32000
    expected = own / (own + (8 * 8 + 32) * layer + 9 * head)
    assert share_of_bytes(LlamaConfig(**SHAPES["llama2-7B"]), 8, 4, 8, 0) == pytest.approx(expected, rel=1e-6)
    assert share_of_bytes(LlamaConfig(**SHAPES["llama2-7B"]), 8, 4, 3, 0) == 0


def test_share_of_time_is_one() -> None:
    model = from_transformers(tiny_llama(num_layers=4, max_position_embeddings=640), layout="plain")
    assert 0 < share_of_time(SelfSpecGenerator(model), 1, 2, 8) < 1
