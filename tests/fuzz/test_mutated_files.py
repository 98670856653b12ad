"""A short form of `tests.fuzz.mutated_files`: a change of files is refused in one line, or it is in the logits."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf")
from tests.fuzz.mutated_files import try_one
from tests.fuzz.small_checkpoints import FORMATS

ALWAYS = ("safetensors, sharded", "gptq", "packed, zero points", "gguf Q4_0", "adapters")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_one_change_of_each_format(name: str) -> None:
    about, found = try_one(name, 7)
    assert not found.startswith("WRONG"), f"{name}:7 {about}: {found}"
