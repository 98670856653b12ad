"""What layers and confidences have in common: the fit against its own optimum, and what it makes of little and of much."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.acceptance_table import DOUBT_BINS
from policies.auto.acceptance_model import AcceptanceModel

LAYERS = (1, 2, 3, 4, 6, 8)


def counts(acceptance: np.ndarray, rows: float) -> tuple[np.ndarray, np.ndarray]:
    """(accepted, seen) of as many rows in every bin."""
    seen = np.full(acceptance.shape, rows)
    return acceptance * seen, seen


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


NOTHING = counts(np.zeros((len(LAYERS), len(DOUBT_BINS))), 0.0)


def test_unseen_layers_are_right_more_often_than_sure_and_alike() -> None:
    estimate = AcceptanceModel(LAYERS, 16).acceptance(*NOTHING)
    assert np.all(estimate == estimate[0]) and np.all(np.diff(estimate[0]) >= 0)
    assert np.all(estimate[0, :10] > DOUBT_BINS.midpoints[:10])


def test_much_evidence_is_believed() -> None:
    truth = np.random.default_rng(0).uniform(size=(len(LAYERS), len(DOUBT_BINS)))  # far from any line
    model = AcceptanceModel(LAYERS, 16)
    model.fit(*counts(truth, 1e5))
    assert model.acceptance(*counts(truth, 1e5)) == pytest.approx(truth, abs=1e-3)


def test_a_line_is_found() -> None:
    odds = np.log(np.clip(DOUBT_BINS.midpoints, 0.03, 0.9999)) - np.log(1 - np.clip(DOUBT_BINS.midpoints, 0.03, 0.9999))
    truth = sigmoid(np.array([-3.0, 0.3, 0.7, 1.2, 2.0, 2.8])[:, None] + 1.3 * odds)
    model = AcceptanceModel(LAYERS, 16)
    for _ in range(12):
        model.fit(*counts(truth, 500.0))
    assert model.acceptance(*NOTHING) == pytest.approx(truth, abs=0.02)


def test_a_few_rows_move_a_whole_layer_and_less_its_neighbours() -> None:
    model = AcceptanceModel(LAYERS, 16)
    before = model.acceptance(*NOTHING)
    accepted, seen = (array.copy() for array in NOTHING)
    seen[3, 5] = 6.0  # all rejected
    model.fit(accepted, seen)
    moved = before - model.acceptance(*NOTHING)
    assert np.all(moved[:, 5] > 0.03)  # what one layer shows says something of all
    assert moved[3, 5] == moved[:, 5].max() and moved[3, 2] > moved[0, 2]
    assert model.acceptance(accepted, seen)[3, 5] < before[3, 5] - 0.3


def test_drafts_in_fewer_bits_have_a_line_of_their_own() -> None:
    """Exits that are right one time in ten whatever their confidence say nothing about those of the whole model."""
    odds = np.log(DOUBT_BINS.midpoints) - np.log(1 - np.clip(DOUBT_BINS.midpoints, 0.03, 0.9999))
    truth = sigmoid(np.array([-2.2, -2.2, 3.5])[:, None] + np.array([0.0, 0.0, 1.2])[:, None] * odds)
    nothing = {size: counts(np.zeros((size, len(DOUBT_BINS))), 0.0) for size in (1, 2, 3)}
    model = AcceptanceModel((2, 4, -8), 16)
    for _ in range(12):
        model.fit(*counts(truth, 500.0))
    assert model.acceptance(*nothing[3]) == pytest.approx(truth, abs=0.03)
    other = AcceptanceModel((2, 4), 16)
    other.restore(model.state(), (2, 4, -8))
    assert other.acceptance(*nothing[2]) == pytest.approx(truth[:2], abs=0.03)
    again = AcceptanceModel((2, 4, -8), 16)
    again.restore(other.state(), (2, 4))
    assert again.acceptance(*nothing[3])[2] == pytest.approx(AcceptanceModel((-8,), 16).acceptance(*nothing[1])[0])


@settings(max_examples=60)
@given(data=st.data(), rows=st.sampled_from([1.0, 30.0, 2000.0]))
def test_fits_settle_where_nothing_is_more_probable(data: st.DataObject, rows: float) -> None:
    """Also from counts that no line explains: an unguarded Newton step jumps back and forth there."""
    shares = data.draw(
        st.lists(
            st.sampled_from([0.0, 0.1, 0.9, 1.0]),
            min_size=len(LAYERS) * len(DOUBT_BINS),
            max_size=len(LAYERS) * len(DOUBT_BINS),
        )
    )
    weights = data.draw(
        st.lists(
            st.sampled_from([0.0, 1.0]), min_size=len(LAYERS) * len(DOUBT_BINS), max_size=len(LAYERS) * len(DOUBT_BINS)
        )
    )
    seen = rows * np.array(weights).reshape(len(LAYERS), len(DOUBT_BINS))
    accepted = seen * np.array(shares).reshape(seen.shape)
    model = AcceptanceModel(LAYERS, 16)
    for _ in range(40):
        model.fit(accepted, seen)
    first = np.array(model.state()["parameters"])
    model.fit(accepted, seen)
    assert np.array(model.state()["parameters"]) == pytest.approx(first, abs=1e-6)
    estimate = model.acceptance(accepted, seen)
    assert np.all((estimate > 0) & (estimate < 1))


def test_state_is_for_the_same_layers() -> None:
    model, other = AcceptanceModel(LAYERS, 16), AcceptanceModel(LAYERS, 16)
    model.fit(*counts(np.full((len(LAYERS), len(DOUBT_BINS)), 0.25), 3.0))
    other.restore(model.state(), LAYERS)
    assert np.array_equal(other.acceptance(*NOTHING), model.acceptance(*NOTHING))
    model.reset()
    assert np.array_equal(model.acceptance(*NOTHING), AcceptanceModel(LAYERS, 16).acceptance(*NOTHING))
    with pytest.raises(ValueError, match="7 parameters, for 2 layers"):
        AcceptanceModel((1, 2), 16).restore(other.state(), (1, 2))
