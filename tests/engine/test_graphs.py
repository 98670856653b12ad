"""Passes as CUDA graphs: the texts of transformers and of the eager runner, whatever shares a pass.

Without a GPU the passes run uncaptured, in Triton's interpreter (`make test-triton`). What needs one is in test_on_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fuzz_models import random_model
from interpreted_triton import DEVICE, triton_rows
from layerskip_models import from_transformers
from layerskip_models.checkpoints import conversion
from layerskip_models.families import IN_TRANSFORMERS
from selfspec import SelfSpecGenerator
from selfspec.engine import model_source
from selfspec.engine.runners import graphs as graphs_module
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.runners.graphs import GraphRunner

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


@pytest.mark.parametrize(
    "family", [one for one in IN_TRANSFORMERS if DEVICE == "cuda" or one in ("llama", "qwen3", "olmo2")]
)
def test_texts_are_those_of_the_eager_runner(family: str, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, drafted, sampled, and two texts in each pass."""
    config = IN_TRANSFORMERS[family].config(**SIZES)
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
