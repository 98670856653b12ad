"""Texts are the model's own, alone and in company: family x weights x kernels x policy x way of choosing x settings.

Every run has the cells of a covering array, drawn with a fixed seed: any two values of two columns meet. All other cells are
slow, a model's together.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from batched_runs import BATCH_SENSITIVE, Wish, assert_same, needs_native, run_alone, run_together
from exact_cells import BITS, FEW, Cell, cells_of, check_cell, check_plain, drawn_cells
from layerskip_models import draft_vocabulary
from layerskip_models.families import FAMILIES
from matrix_models import NONE, VARIANTS, WEIGHTS, exists, kernels_of, model_of
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_tokenizer

MODELS = [(f, w, v) for f in FAMILIES for w in WEIGHTS for v in VARIANTS if exists(f, w, v)]
DRAWN = drawn_cells()


@pytest.mark.parametrize("cell", DRAWN, ids=lambda cell: cell.name)
def test_cell(cell: Cell) -> None:
    check_cell(cell)


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize(("weights", "variant"), [("float64", NONE), ("bfloat16", VARIANTS[0])])
def test_texts_that_few_tokens_do_not_suit(
    weights: str, variant: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a text its drafts begin to choose among all tokens, whatever the others do."""
    if (variant == NONE) != (weights == "float64"):
        pytest.skip("no native kernels here")
    monkeypatch.setattr(draft_vocabulary, "_ENOUGH", 4)
    for most in (0.1, 0.5):
        monkeypatch.setattr(draft_vocabulary, "_MOST_MISSED", most)
        cell = Cell("llama", weights, variant, "auto", "ls:{E}-4", 2, mode, "in company", "length", vocabulary=FEW)
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


@needs_native
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 9, "seed": 11}], ids=["greedy", "seeded"])
def test_every_pair_of_policies_that_learn_nothing(options: dict[str, Any]) -> None:
    """Two texts that share their passes draft and accept what each does alone, wherever the exits and bits of both meet."""
    variant = next(one for one in VARIANTS if one != NONE and exists("llama", "float32", one))
    with kernels_of(variant):
        model = model_of("llama", "float32", variant)
        generator = SelfSpecGenerator(model, tiny_tokenizer(), prefix_cache=0)
        fixed = [name for name in (*EVERY_POLICY, *BITS) if name not in BATCH_SENSITIVE]
        names = [name for name in fixed if not named_policy(name, 2, model).learns]
        wishes = [Wish(prompt=[3, 1, 4, 1], policy=name, options={"max_new_tokens": 12, **options}) for name in names]
        alone = [run_alone(model, wish) for wish in wishes]
        for pair in combinations(range(len(names)), 2):
            for course, number in zip(run_together(generator, [wishes[number] for number in pair]), pair):
                assert_same(course, alone[number])
