"""Settings that every test runs under, and the tiny models that many share.

PyTorch and all that needs it is imported where it is used: the process that only hands out the tests does without, and the
others need not wait for it.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from faster_tests import build_once, freeze, keep_bytecode

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from selfspec import SelfSpecGenerator

keep_bytecode()
# No test makes an encrypted connection, and every client of HTTP would read all certificates of the system, in .13 seconds.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent / "helpers")
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SELFSPEC_CACHE"] = ""  # a test keeps no costs, and finds nobody's
if shutil.which("nvidia-smi") is None:  # Triton reads it when it is imported, if it is installed
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run, so that a red CI is a change in the code and near-ties are counted once and for all.
settings.register_profile(
    "deterministic", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deterministic")


def pytest_collection_finish() -> None:
    """Leave alone what is imported by now. Not called in the process that only hands out the tests."""
    import torch

    build_once()
    torch.set_num_threads(1)  # a second thread costs more than a tiny matrix
    if hasattr(os, "register_at_fork"):
        # A forked process has none of its parent's threads, and its first product would wait for them for ever.
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
    freeze()


@pytest.hookimpl(trylast=True)  # after the ends of the fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Again after every file, which imports more and leaves caches."""
    if nextitem is not None and nextitem.path != item.path:
        freeze()


@pytest.fixture(scope="session")
def llama64() -> LlamaForCausalLM:
    """A float64 model of 4 layers that exits early with fair agreement. Tests must not change it."""
    import torch

    from tiny_llama import tiny_llama

    return tiny_llama(dtype=torch.float64, seed=3)


@pytest.fixture
def engine64(llama64: LlamaForCausalLM) -> SelfSpecGenerator:
    from layerskip_models import from_transformers
    from selfspec import SelfSpecGenerator

    return SelfSpecGenerator(from_transformers(llama64, layout="plain"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_llama import tiny_llama, tiny_tokenizer

    path = tmp_path_factory.mktemp("tiny-checkpoint")
    tiny_llama(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
