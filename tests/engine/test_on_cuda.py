"""CUDA graphs on a GPU: texts beside transformers' and the eager runner's, and what a capture leaves behind.

What runs without a GPU, in Triton's interpreter, is in test_graphs.py.
"""

from __future__ import annotations

import gc
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from fuzz_models import random_model
from interpreted_triton import DEVICE, triton_rows
from layerskip_models import from_transformers
from layerskip_models.families import IN_TRANSFORMERS
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.graphs import GraphRunner
from selfspec.engine.runners.runner import RunnerChoice
from test_graphs import SIZES as FEW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")]
PROMPTS = [[5, 9, 3], [1, 2, 3, 4, 5], [*range(20, 33)]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
SIZES: dict[str, Any] = {
    **FEW, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}
NAMES = ["llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "smollm3"]
HALF = [torch.bfloat16, torch.float16]


@cache
def network(family: str, dtype: torch.dtype) -> PreTrainedModel:
    config = IN_TRANSFORMERS[family].config(**SIZES, **WINDOWS.get(family, {}))
    return random_model(config, late_scale=0.5, sharpness=1.5, seed=3).to(DEVICE, dtype)


@cache
def engine(family: str, dtype: torch.dtype, runner: RunnerChoice = "auto") -> SelfSpecGenerator:
    """Captures are made once for all tests of a process."""
    made = SelfSpecGenerator(from_transformers(network(family, dtype)), runner=runner)
    assert made.runner == ("eager" if DEVICE == "cpu" or runner == "eager" else "graphs")
    return made


@cache
def theirs(family: str) -> list[list[int]]:
    """The texts of transformers in float32."""
    config, found = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=24), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        out = network(family, torch.float32).generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def texts(generator: SelfSpecGenerator, **options: Any) -> list[list[int]]:
    return [generator.generate(prompt, **{**OPTIONS, **options}).new_tokens for prompt in PROMPTS]


def together(generator: SelfSpecGenerator, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    found = generator.generate_batch(prompts, batch_size=len(prompts), **{**OPTIONS, **options})
    return [one.new_tokens for one in found]


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("runner", ["eager", "auto"])
def test_float32_gives_the_texts_of_transformers(family: str, runner: RunnerChoice) -> None:
    """Two families have layers with a window that is shorter than the text."""
    own = engine(family, torch.float32, runner)
    assert texts(own, policy="ar") == theirs(family)
    assert texts(own, policy="ls:2-3") == theirs(family)
    assert together(own, PROMPTS, policy="ls:2-3") == theirs(family)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_the_same_by_drafts(family: str, dtype: torch.dtype) -> None:
    """Bit for bit. Prompts that share a pass may have other bits than each alone, and are compared among themselves."""
    own = engine(family, dtype)
    plain = texts(own, policy="ar")
    assert texts(own, policy="ls:2-3") == texts(own, policy="auto:cost=layers") == plain
    assert together(own, PROMPTS, policy="ls:2-3") == together(own, PROMPTS, policy="ar")


@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_policy_gives_the_text_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    own = engine("llama", dtype)
    plain = theirs("llama") if dtype == torch.float32 else texts(own, policy="ar")
    assert texts(own, policy=named_policy(name, 2, own.model)) == plain


@pytest.mark.parametrize("policy", ["ar", "ls:2-3", "auto:cost=layers"])
def test_samples_are_those_of_the_eager_runner(policy: str) -> None:
    options = {"policy": policy, "do_sample": True, "top_k": 8, "seed": 4}
    graphs, eager = engine("llama", torch.float32), engine("llama", torch.float32, "eager")
    assert texts(graphs, **options) == texts(eager, **options)
    assert together(graphs, PROMPTS, **options) == together(eager, PROMPTS, **options)


def test_more_than_64_rows_take_several_passes() -> None:
    """Of 24 texts with up to four rows each; logits of sampled ones outlive the next pass."""
    prompts = [[1 + number % 50, *PROMPTS[number % 3]] for number in range(24)]
    for dtype in (torch.float32, torch.bfloat16):
        own = engine("llama", dtype)
        assert together(own, prompts, policy="ls:2-3") == together(own, prompts, policy="ar")
    options = {"policy": "ls:2-3", "do_sample": True, "top_k": 8, "seed": 4}
    eager = engine("llama", torch.float32, "eager")
    assert together(engine("llama", torch.float32), prompts, **options) == together(eager, prompts, **options)


def test_a_capture_that_fails_says_what_to_do_and_leaves_the_device_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random generator goes on, memory comes back, and the next capture works."""
    own = SelfSpecGenerator(from_transformers(network("llama", torch.float32)))
    silu_mul = triton_rows.silu_mul

    def waits(gate_up: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            gate_up.sum().item()
        return silu_mul(gate_up)

    reserved = []
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(triton_rows, "silu_mul", waits)
            with pytest.raises(RuntimeError, match="pass runner='eager'"):
                own.generate(PROMPTS[0], max_new_tokens=4)
        torch.manual_seed(0)
        first = torch.rand(8, device=DEVICE)
        torch.manual_seed(0)
        assert torch.equal(torch.rand(8, device=DEVICE), first)
        assert not torch.equal(torch.rand(8, device=DEVICE), first)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] <= reserved[1]
    assert texts(own, policy="ls:2-3") == theirs("llama")


@pytest.mark.parametrize("policy", ["ar", "ls:2-3", "dv:2"])
def test_a_warm_run_waits_for_nothing_but_the_end_of_each_pass(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises at any other wait, from the second piece of the text on until it nears its end."""
    own, found = engine("llama", torch.bfloat16), list[Any]()
    replay = GraphRunner._replay

    def waits_for_its_end(self: GraphRunner, key: Any) -> None:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        replay(self, key)
        torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(GraphRunner, "_replay", waits_for_its_end)
    options = {**OPTIONS, "max_new_tokens": 40, "policy": policy}
    expected = own.generate(PROMPTS[0], **options).new_tokens
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, that this mode is a prototype
        try:
            for piece in own.stream(PROMPTS[0], **options):
                found += piece
                torch.cuda.set_sync_debug_mode("error" if 2 <= len(found) < 30 else "default")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found == expected
