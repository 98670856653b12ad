"""Which runner a model gets, and that attention on CUDA never uses cuDNN. `test_cuda_paths` has the operators' ways there."""

from __future__ import annotations

import threading

import pytest
from torch.backends import cuda as backends

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.runner import without_cudnn
from test_cuda_paths import TEXT
from tiny_llama import tiny_llama


def test_graphs_need_a_gpu() -> None:
    """On a CPU texts are decoded eagerly, and who asks for graphs is told why not."""
    model = from_transformers(tiny_llama(seed=3))
    engine = SelfSpecGenerator(model)
    assert engine.generate(TEXT, max_new_tokens=4).stats.runner == engine.runner == "eager"
    with pytest.raises(ValueError, match="CUDA graphs need a model on a CUDA device: pass runner='eager'"):
        SelfSpecGenerator(model, runner="graphs")
    with pytest.raises(ValueError, match="runner must be one of auto, eager, graphs, got 'captured'"):
        SelfSpecGenerator(model, runner="captured")  # type: ignore[arg-type]


def switches() -> tuple[bool, ...]:
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return tuple(getattr(backends, f"{kind}_sdp_enabled")() for kind in kinds)


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
