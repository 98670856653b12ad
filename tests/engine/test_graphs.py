"""Passes as CUDA graphs: the texts of transformers and of the eager runner, whatever shares a pass.

Without a GPU the passes run uncaptured, in Triton's interpreter (`make test-triton`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fuzz_models import random_model
from interpreted_triton import DEVICE, triton_rows
from layerskip_models import from_transformers
from layerskip_models.checkpoints import conversion
from layerskip_models.families import FAMILIES
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine import model_source
from selfspec.engine.runners import graphs as graphs_module
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.runners.graphs import GraphRunner
from tiny_llama import reference_greedy, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in Triton's interpreter
PROMPTS = [[5, 9, 3], [1, 2, 3, 4, 5]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": []}
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


class Interpreted(GraphRunner):
    """Runs each pass where it would replay it."""

    passes = 0

    def _prepare(self, key: Any) -> None:
        self._graphs[key] = None  # type: ignore[assignment]

    def _replay(self, key: Any) -> None:
        Interpreted.passes += 1
        self._body(key)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines run graphs, or their passes in the interpreter."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_rows, "PARTS", 2)
        monkeypatch.setattr(graphs_module, "MAX_ROWS", 4)  # two texts that verify take two passes
        monkeypatch.setattr(conversion, "interleaves", lambda device: False)
        monkeypatch.setattr(model_source, "make_runner", lambda model, name: Interpreted(model))
    yield


def texts(engine: SelfSpecGenerator, **options: Any) -> list[list[int]]:
    return [engine.generate(prompt, **OPTIONS, **options).new_tokens for prompt in PROMPTS]


@pytest.mark.parametrize("family", [one for one in FAMILIES if DEVICE == "cuda" or one in ("llama", "qwen3", "olmo2")])
def test_texts_are_those_of_the_eager_runner(family: str, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, drafted, sampled, and two texts in each pass."""
    config = FAMILIES[family].config(**SIZES)
    network = random_model(config, late_scale=0.5, sharpness=1.5, seed=0).float().to(DEVICE)
    engine = SelfSpecGenerator(from_transformers(network, layout="plain"))
    Interpreted.passes = 0
    plain, drafted = texts(engine, policy="ar"), texts(engine, policy="ls:1-2")
    sampled = texts(engine, policy="ls:1-2", do_sample=True, seed=4)
    together = [one.new_tokens for one in engine.generate_batch(PROMPTS, batch_size=2, policy="ls:1-2", **OPTIONS)]
    drawn = engine.generate_batch(PROMPTS, batch_size=2, policy="ls:1-2", do_sample=True, seed=4, **OPTIONS)
    assert Interpreted.passes > 10 or engine.runner == "graphs"
    monkeypatch.setattr(model_source, "make_runner", lambda model, name: EagerRunner(model))
    eager = SelfSpecGenerator(from_transformers(network, layout="plain"))
    assert plain == drafted == together == texts(eager, policy="ar")
    assert sampled == texts(eager, policy="ls:1-2", do_sample=True, seed=4)
    alone = eager.generate_batch(PROMPTS, batch_size=2, policy="ls:1-2", do_sample=True, seed=4, **OPTIONS)
    assert [one.new_tokens for one in drawn] == [one.new_tokens for one in alone]


def cuda_model(dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    if DEVICE == "cpu":
        pytest.skip("no CUDA device")
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
    return tiny_llama(dtype=dtype, seed=3, num_layers=4, **{**shape, **config}).to("cuda")


@pytest.mark.gpu
def test_every_policy_gives_the_model_s_own_text() -> None:
    llama = cuda_model(torch.float32)
    expected = reference_greedy(llama, PROMPTS[0], max_new_tokens=20)
    engine = SelfSpecGenerator(from_transformers(llama))
    assert engine.runner == "graphs"
    for name in EVERY_POLICY:
        policy = named_policy(name, 2, engine.model)
        assert engine.generate(PROMPTS[0], max_new_tokens=20, policy=policy).new_tokens == expected, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_same_by_every_policy_and_in_company(dtype: torch.dtype) -> None:
    """Bit for bit the text that plain decoding gives."""
    engine = SelfSpecGenerator(from_transformers(cuda_model(dtype)))
    plain = engine.generate(PROMPTS[0], max_new_tokens=20, policy="ar").new_tokens
    for name in EVERY_POLICY:
        policy = named_policy(name, 2, engine.model)
        assert engine.generate(PROMPTS[0], max_new_tokens=20, policy=policy).new_tokens == plain, name
    together = engine.generate_batch([PROMPTS[0], *PROMPTS], batch_size=3, max_new_tokens=20, policy="ls:2-3")
    assert next(iter(together)).new_tokens == plain


@pytest.mark.gpu
def test_a_capture_that_fails_says_what_to_do_and_leaves_the_device_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SelfSpecGenerator(from_transformers(cuda_model(torch.float32)))
    silu_mul = triton_rows.silu_mul

    def waits(gate_up: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            gate_up.sum().item()
        return silu_mul(gate_up)

    monkeypatch.setattr(triton_rows, "silu_mul", waits)
    with pytest.raises(RuntimeError, match="pass runner='eager'"):
        engine.generate(PROMPTS[0], max_new_tokens=4)
    monkeypatch.undo()
    torch.rand(2, device="cuda")
    assert len(engine.generate(PROMPTS[0], max_new_tokens=4, eos_token_id=[]).new_tokens) == 4
