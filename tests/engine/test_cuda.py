"""CUDA decodes eagerly, and attention there never uses cuDNN. `test_cuda_paths` has the operators' ways on CUDA."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.backends import cuda as backends

from layerskip_models import from_transformers
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.runner import without_cudnn
from test_cuda_paths import TEXT
from tiny_llama import reference_greedy, tiny_llama


@pytest.mark.gpu
def test_cuda_decodes_eagerly() -> None:
    """The model's own text on a GPU, by every policy and in company, whatever runner is asked for."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    llama = tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3)
    expected = reference_greedy(llama, TEXT, max_new_tokens=20)
    with pytest.warns(RuntimeWarning, match="CUDA decodes eagerly"):
        engine = SelfSpecGenerator(from_transformers(llama.to("cuda")), runner="graphs")
    assert engine.runner == "eager"
    for name in EVERY_POLICY:
        policy = named_policy(name, 2, engine.model)
        assert engine.generate(TEXT, max_new_tokens=20, policy=policy).new_tokens == expected, name
    for result in engine.generate_batch([TEXT] * 3, max_new_tokens=20, policy="ls:2-3"):
        assert result.new_tokens == expected


def test_graphs_are_not_available() -> None:
    """They say so, and texts are decoded eagerly. Other names are refused."""
    model = from_transformers(tiny_llama(seed=3))
    with pytest.warns(RuntimeWarning, match="runner='graphs' is not available at present: CUDA decodes eagerly"):
        engine = SelfSpecGenerator(model, runner="graphs")
    assert engine.generate(TEXT, max_new_tokens=4).stats.runner == engine.runner == "eager"
    with pytest.raises(ValueError, match="runner must be one of auto, eager, graphs, got 'captured'"):
        SelfSpecGenerator(model, runner="captured")  # type: ignore[arg-type]


def switches() -> tuple[bool, ...]:
    return (
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )


def test_cudnn_is_off_until_the_last_one_leaves() -> None:
    """The switches are the process's: a thread that leaves must not switch it on for one that is still inside."""
    before = switches()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with without_cudnn:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    try:
        backends.enable_math_sdp(False)  # as somebody may have set it
        with pytest.raises(KeyError), without_cudnn:
            assert switches() == (True, True, True, False)
            thread.start()
            assert entered.wait(10)
            raise KeyError
        assert switches() == (True, True, True, False)
        leave.set()
        thread.join()
        assert switches() == (before[0], before[1], False, before[3])
    finally:
        backends.enable_math_sdp(True)
    assert switches() == before
