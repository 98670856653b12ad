"""Texts are the model's own, alone and in company: family x weights x kernels x policy x way of choosing x settings.

Every run has the cells of a covering array, drawn with a fixed seed: any two values of two columns meet. All other cells are
slow, a model's together.
"""

from __future__ import annotations

import pytest

from exact_cells import Cell, cells_of, check_cell, check_plain, drawn_cells
from layerskip_models.families import FAMILIES
from matrix_models import VARIANTS, WEIGHTS, exists

MODELS = [(f, w, v) for f in FAMILIES for w in WEIGHTS for v in VARIANTS if exists(f, w, v)]
DRAWN = drawn_cells()


@pytest.mark.parametrize("cell", DRAWN, ids=lambda cell: cell.name)
def test_cell(cell: Cell) -> None:
    check_cell(cell)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "weights", "variant"), MODELS)
def test_all_cells(family: str, weights: str, variant: str) -> None:
    for cell in cells_of(family, weights, variant):
        try:
            check_cell(cell)
        except Exception as error:
            error.add_note(cell.name)
            raise


@pytest.mark.parametrize(("family", "weights", "variant"), MODELS)
def test_plain_decoding_is_transformers(family: str, weights: str, variant: str) -> None:
    """Of the numbers that each format stands for, with every variant of the kernels."""
    check_plain(family, weights, variant)
