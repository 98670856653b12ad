"""How many Python calls stand between a user's call and our kernels, once for each drafted row."""

from __future__ import annotations

import sys

import pytest

from layerskip_models import from_transformers
from layerskip_models.kernels.library import kernels
from layerskip_models.kernels.native_layers import NativeLayers
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

MOST_FRAMES = 9


@pytest.mark.skipif(kernels() is None, reason="needs the native library")
@pytest.mark.parametrize("policy", ["ar", "ls:2-3", "dv:2"])
def test_few_frames_from_generate_to_the_kernels(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = SelfSpecGenerator(from_transformers(tiny_llama(seed=3), layout="native"))
    backend = generator.model.backend
    assert isinstance(backend, NativeLayers)
    run_step, stacks = backend.run_step, []

    def counted(address: int, threads: int) -> int:
        frame, names = sys._getframe(1), []
        while frame.f_code is not SelfSpecGenerator.generate.__code__:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        stacks.append([*names, "generate"])
        return run_step(address, threads)

    monkeypatch.setattr(backend, "run_step", counted)
    generator.generate([5, 1, 7], max_new_tokens=12, policy=policy)
    rounds = [stack for stack in stacks if "run_round" in stack]
    assert len(rounds) >= 3
    assert max(map(len, rounds)) <= MOST_FRAMES, max(rounds, key=len)
