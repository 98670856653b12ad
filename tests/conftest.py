"""Settings that every test runs under, and the tiny models that many share."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import LlamaForCausalLM

import bench.run
import selfspec.engine.runners.cuda_graph.buffers
import selfspec.engine.runners.cuda_graph.runner
from layerskip_models import from_transformers
from policies import MeasuredCost
from selfspec import SelfSpecGenerator
from study_records import with_studies as with_studies
from tiny_llama import tiny_llama, tiny_tokenizer

# The same examples in every run, so that a red CI is a change in the code and near-ties are counted once and for all.
settings.register_profile(
    "deterministic", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deterministic")

torch.set_num_threads(1)  # a second thread costs more than a tiny matrix


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it in every test that counts what is left."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def small_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of captures at which a tiny model has several: blocks of two layers, attention over 8, 16, 32, .. positions."""
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.buffers, "BLOCK", 2)
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.runner, "SMALLEST_SPAN", 8)
    monkeypatch.setattr(selfspec.engine.runners.cuda_graph.runner, "_FEW_ROWS", 4)


@pytest.fixture(scope="session")
def llama64() -> LlamaForCausalLM:
    """A float64 model of 4 layers that exits early with fair agreement. Tests must not change it."""
    return tiny_llama(dtype=torch.float64, seed=3)


@pytest.fixture
def engine64(llama64: LlamaForCausalLM) -> SelfSpecGenerator:
    """A fresh generator over that model."""
    return SelfSpecGenerator(from_transformers(llama64, layout="plain"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer."""
    path = tmp_path_factory.mktemp("tiny-checkpoint")
    tiny_llama(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `selfspec-bench run` measures the same seconds."""
    cost = MeasuredCost(num_layers=4, layer_seconds=(1e-3, 1.1e-3), head_seconds=(5e-4, 6e-4))
    monkeypatch.setattr(bench.run, "measured_cost", lambda model, runner: cost)
