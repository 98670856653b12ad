"""Faults that must not go unseen, planted one at a time: the matrix's own check finds each of them.

Faults of a law, which no single text shows, are planted in `tests/law`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

import selfspec.detokenize
import selfspec.engine.runners.eager
import selfspec.engine.verification
from exact_cells import FEW, Cell, check_cell
from layerskip_models import draft_vocabulary
from layerskip_models.kernels.library import Step
from layerskip_models.kv_cache import KVCache
from matrix_models import NONE, VARIANTS, kernels_of, model_of
from selfspec.engine.accept import accept_sampled
from selfspec.engine.sampling import Sampler
from selfspec.engine.stopping import StopConditions, StopReason

NATIVE = VARIANTS[0]
ON_OPERATORS, ON_KERNELS = ("float64", NONE), ("float32", NATIVE)


def cells(weights: str, variant: str, **changes: Any) -> list[Cell]:
    """Texts that draft up to each exit layer, four tokens at a time unless changed."""
    base = Cell("llama", weights, variant, "auto", "ls:{E}-4", 1, "greedy", "alone", "length")
    return [base._replace(exit_layer=exit_layer, **changes) for exit_layer in (1, 2, 3)]


def bonus_from_q(patch: pytest.MonkeyPatch, cell: Cell) -> None:
    """The token behind drafts that were all accepted is drawn from the last draft's distribution."""

    def fault(p: Tensor, q: Tensor, reached: Sequence[float], uniforms: Sequence[float]) -> tuple[int, Tensor]:
        accepted, weights = accept_sampled(p, q, reached, uniforms)
        return accepted, q[accepted - 1] if 0 < accepted == len(uniforms) else weights

    patch.setattr(Sampler, "accept", lambda *arguments, **options: None)  # the kernels would do all of it in one call
    patch.setattr(selfspec.engine.verification, "accept_sampled", fault)


def row_that_depends_on_its_company(patch: pytest.MonkeyPatch, cell: Cell) -> None:
    """The last bit of each row's first number is another one where there are several texts in a pass."""
    with kernels_of(cell.variant):
        model = model_of(cell.family, cell.weights, cell.variant)
    backend: Any = model.backend
    original = backend.run_step

    def fault(address: int, threads: int) -> int:
        found, step = original(address, threads), Step.from_address(address)
        for row in range(step.rows if step.num_spans > 1 else 0):
            ctypes.c_int32.from_address(step.outputs + 4 * model.hidden_size * row).value ^= 1
        return found

    patch.setattr(backend, "run_step", fault)


def tokens_of_another_text(patch: pytest.MonkeyPatch, cell: Cell) -> None:
    """All texts of a pass draft among the tokens of the first one."""
    original = draft_vocabulary.with_own_tokens

    def fault(model: Any, found: Any, hidden: Any, texts: Sequence[Any], detail: Any) -> Any:
        return original(model, found, hidden, [texts[0]] * len(texts), detail)

    for place in (draft_vocabulary, selfspec.engine.runners.eager):
        patch.setattr(place, "with_own_tokens", fault)


def stop_missed_inside_a_draft(patch: pytest.MonkeyPatch, cell: Cell) -> None:
    """Only the last token of a round is looked at."""
    original = StopConditions.first_stop

    def fault(
        self: StopConditions, block: Sequence[int], text: Tensor | None, length: int, num_new: int
    ) -> tuple[int, StopReason | None]:
        count, reason = original(self, block, text, length, num_new)
        return (len(block), None) if count < len(block) and reason != "length" else (count, reason)

    patch.setattr(StopConditions, "first_stop", fault)


def row_left_over_after_rollback(patch: pytest.MonkeyPatch, cell: Cell) -> None:
    """The first rejected draft's row stays."""
    original = KVCache.roll_back
    patch.setattr(KVCache, "roll_back", lambda self, length: original(self, min(length + 1, self.length)))


def stop_string_cut_one_byte_late(patch: pytest.MonkeyPatch, cell: Cell) -> None:
    original = selfspec.detokenize.before_stop
    patch.setattr(selfspec.detokenize, "before_stop", lambda text, stops: text[: len(original(text, stops)) + 1])


@pytest.mark.parametrize(
    ("fault", "found_in"),
    [
        (bonus_from_q, cells(*ON_OPERATORS, mode="one choice", policy="ls:{E}-1")),
        (bonus_from_q, cells(*ON_KERNELS, mode="one choice", policy="ls:{E}-1")),
        (row_that_depends_on_its_company, cells(*ON_KERNELS, company="in company")),
        (row_that_depends_on_its_company, cells(*ON_KERNELS, company="in company", mode="seeded", policy="ar")),
        (tokens_of_another_text, cells(*ON_KERNELS, company="in company", policy="dv:{E}", vocabulary=FEW)),
        (stop_missed_inside_a_draft, cells(*ON_OPERATORS, settings="eos")),
        (stop_missed_inside_a_draft, cells(*ON_KERNELS, settings="stop string")),
        (row_left_over_after_rollback, cells(*ON_OPERATORS)),
        (row_left_over_after_rollback, cells(*ON_KERNELS)),
        (stop_string_cut_one_byte_late, cells(*ON_OPERATORS, settings="stop string")),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_check_finds(fault: Callable[[pytest.MonkeyPatch, Cell], None], found_in: list[Cell]) -> None:
    """In at least one of the cells, all of which pass without it."""
    if any(cell.variant not in VARIANTS or (cell.variant == NONE) != (cell.weights == "float64") for cell in found_in):
        pytest.skip("no native kernels here")
    for cell in found_in:
        check_cell(cell)
    found = 0
    for cell in found_in:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch, cell)
            try:
                check_cell(cell)
            except (AssertionError, ValueError, IndexError):
                found += 1
    assert found
