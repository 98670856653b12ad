"""A short form of `tests.fuzz.mutated_files`: a change of files is refused in one line, or it is in the logits."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("gguf")
from small_checkpoints import FORMATS
from tests.fuzz import file_mutations
from tests.fuzz.mutated_files import same_logits, try_one

ALWAYS = ("safetensors, sharded", "gptq", "packed, zero points", "gguf Q4_0", "adapters")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_one_change_of_each_format(name: str) -> None:
    about, found = try_one(name, 7)
    assert not found.startswith("WRONG"), f"{name}:7 {about}: {found}"


def test_another_matrix_of_the_same_shape_is_known_to_be_a_change(tmp_path: Path) -> None:
    """A transposed square matrix: no reader can refuse it, so it must not count as refused or equal."""
    square = torch.arange(4.0).view(2, 2)
    seen = set()
    for seed in range(300):
        save_file({"square": square}, tmp_path / "model.safetensors")
        about, changes = file_mutations._tensor(tmp_path, Random(seed))
        found = load_file(tmp_path / "model.safetensors").get("square")
        if "shape" in about and found is not None:
            other = found.shape == square.shape and not found.equal(square)
            assert changes or not other
            seen.add(other)
    assert seen == {True, False}


def test_logits_are_the_same_up_to_rounding() -> None:
    """Also where a changed byte makes a weight so large that a norm leaves zeros or NaN of all the rest."""
    logits = torch.tensor([1.0, -2.0, 0.5])
    assert same_logits(logits + 0.01, logits)
    assert not same_logits(logits + 0.1, logits)
    assert not same_logits(logits[:2], logits)
    assert same_logits(torch.zeros(3), torch.zeros(3))
    assert not same_logits(torch.zeros(3), logits)
    half = torch.tensor([1.0, float("nan"), 0.5])
    assert same_logits(half, half)
    assert not same_logits(half, logits)
    assert not same_logits(logits, half)
