"""A short form of `bench.trials.mutated_files`: a change of a checkpoint's files is refused in one line, or is in the logits."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf")
from bench.trials.mutated_files import try_one  # noqa: E402
from bench.trials.small_checkpoints import FORMATS  # noqa: E402


ALWAYS = ("safetensors, sharded", "gptq", "packed, zero points", "gguf Q4_0", "adapters")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_one_change_of_each_format(name: str) -> None:
    about, found = try_one(name, 7)
    assert not found.startswith("WRONG"), f"{name}:7 {about}: {found}"
