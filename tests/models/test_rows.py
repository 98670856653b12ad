"""Rows in 8 or 16 bits beside weights in groups: the default, one model on kernels and operators, and what is refused."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from layerskip_models import load_model
from layerskip_models.draft_weights import drafter_of
from matrix_models import NONE, VARIANTS, kernels_of, model_of, source_of
from selfspec.analysis.inspection import arithmetic_in_words
from selfspec.cli.main import app
from test_kv_dtype import logits

FORMATS = {"Q4_0": {4: 8}, "int4": {4: 8}, "Q4_K_M": {4: 8, 6: 8}, "Q6_K": {6: 8}, "Q5_K": {6: 8}, "Q8_0": {8: 16}}


@pytest.mark.parametrize("weights", FORMATS)
def test_each_format_in_both_settings(weights: str) -> None:
    """Check that kernels and operators differ less from each other than from rows that are not rounded."""
    first = None
    for variant in VARIANTS:
        with kernels_of(variant):
            model, unrounded = model_of("llama", weights, variant).with_adapters({}), 32 if variant == NONE else 16
            said, exact = FORMATS[weights], model.with_rows(16)
            assert {*exact.row_bits.values()} == {unrounded}
            assert variant == NONE or said.items() <= model.row_bits.items()
            if 8 in said.values():
                model = model.with_rows(8) if variant == NONE else model
                made = logits(model, 3)
                first, moved = made if first is None else first, (made - logits(exact, 3)).abs().mean()
                assert torch.equal(logits(exact.with_rows(8), 3), made)
                assert 1e-4 < moved < 0.2 and (made - first).abs().mean() < moved / 3
                assert "with rows in 8" in arithmetic_in_words(model)
                if 4 not in said:  # copies to draft with, whose first layer keeps the model's weights
                    assert 16 not in {getattr(layer.qkv, "row_bits", 8) for layer in drafter_of(exact, 4).layers}
            else:
                with pytest.raises(ValueError, match="rows=8 changes nothing: it is for weights of 4 to 6 bits"):
                    model.with_rows(8)


@pytest.mark.parametrize(
    ("model", "rows", "message"), [("", "7", "rows must be 8 or 16"), ("demo", "16", "rows=16 changes nothing")]
)
def test_the_option(model: str, rows: str, message: str) -> None:
    path = str(source_of("llama", "Q4_0").path)
    assert load_model(path, device="cpu", rows=16).row_bits[4] > 8
    wrong = CliRunner().invoke(app, ["generate", "1", "--model", model or path, "--rows", rows])
    assert wrong.exit_code == 2 and f"error: {message}" in wrong.stderr
