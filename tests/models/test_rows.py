"""Rows in 8 or 16 bits beside weights in groups: the default, the same model on kernels and operators, and what is refused."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from layerskip_models import load_model
from layerskip_models.draft_weights import drafter_of
from matrix_models import NONE, VARIANTS, kernels_of, model_of, source_of
from selfspec import SelfSpecGenerator
from selfspec.analysis.inspection import arithmetic_in_words
from selfspec.cli.main import app
from test_kv_dtype import logits

FORMATS = {"Q4_0": {4: 8}, "int4": {4: 8}, "Q4_K_M": {4: 8, 6: 8}, "Q6_K": {6: 8}, "Q5_K": {8: 16}, "Q8_0": {8: 16}}


@pytest.mark.parametrize("weights", FORMATS)
def test_each_format_in_both_settings(weights: str) -> None:
    """What kernels and operators compute differs less from each other than from rows that are not rounded."""
    found = {}
    for variant in VARIANTS:
        if variant in ("baseline", "neon"):
            continue  # which take rows as floats
        with kernels_of(variant):
            model = model_of("llama", weights, variant).with_adapters({})
            unrounded = 32 if variant == NONE else 16
            said = {bits: min(rows, unrounded) if rows == 8 else unrounded for bits, rows in FORMATS[weights].items()}
            assert said.items() <= model.row_bits.items()
            exact = model.with_rows(16)
            assert set(exact.row_bits.values()) == {unrounded}
            found[variant] = made, moved = logits(model, 3), (logits(model, 3) - logits(exact, 3)).abs().mean()
            if 8 in said.values():
                assert "with rows in 8" in arithmetic_in_words(model)
                assert torch.equal(logits(exact.with_rows(8), 3), made) and 1e-4 < moved < 0.2
                assert (made - found[VARIANTS[0]][0]).abs().mean() < moved / 3
            else:
                with pytest.raises(ValueError, match="rows=8 changes nothing: it is for weights of 4 to 6 bits"):
                    model.with_rows(8)


def test_drafts_have_rows_of_8_bits_in_both_settings() -> None:
    variant = VARIANTS[0]
    with kernels_of(variant):
        exact = model_of("llama", "Q6_K", variant).with_rows(16)
        first, second, *_ = drafter_of(exact, 4).layers
        assert [getattr(one.qkv, "bits") for one in (first, second)] == [6, 4]  # noqa: B009
        assert [getattr(one.qkv, "row_bits") for one in (first, second)] == [8, 8]  # noqa: B009


def test_the_option() -> None:
    path = str(source_of("llama", "Q4_0").path)
    assert load_model(path, device="cpu", rows=16).row_bits[4] > 8
    run = ["generate", "1", "--model"]
    for rows, place, message in (
        ("7", path, "rows must be 8 or 16 (bits), got 7"),
        ("16", "demo", "rows=16 changes nothing: this model has no weights in groups"),
    ):
        wrong = CliRunner().invoke(app, [*run, place, "--rows", rows])
        assert wrong.exit_code == 2 and f"error: {message}" in wrong.stderr
