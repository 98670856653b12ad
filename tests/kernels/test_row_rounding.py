"""Rows rounded to bfloat16 before they meet weights in bfloat16: the same model by every road, and text that is its own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from batched_runs import LAYOUTS, needs_native
from bench.commands.preparation import arithmetic_of, open_model
from cut_rows import CutRows, parts
from layerskip_models import LayerSkipModel, from_transformers, load_model
from layerskip_models.checkpoints.loading import DEMO_PATH
from layerskip_models.kernels.native_linear import NativeLinear, operators_only
from layerskip_models.kernels.threads import on_threads
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from layerskip_models.row_rounding import to_bfloat16
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from test_native import RUNNABLE, use
from tiny_llama import tiny_llama

PROMPTS = ([5, 1, 7, 3, 3, 9, 1], [9, 9, 3], [2], [4, 4, 1, 0])
TOKENS = torch.arange(40) * 7 % 24


def network(seed: int = 3, **config: Any) -> LlamaForCausalLM:
    shape = {"heads": 4, "kv_heads": 2, "late_scale": 0.5, "attention_bias": True, "dtype": torch.bfloat16}
    return tiny_llama(seed=seed, **{**shape, **config})


@cache
def rounding(layout: Layout, seed: int = 3) -> LayerSkipModel:
    return from_transformers(network(seed), layout=layout).with_arithmetic("bfloat16")


def logits(model: LayerSkipModel, rows: int = 40) -> Tensor:
    cache = KVCache(model, len(TOKENS))
    with torch.inference_mode():
        hidden = [model.run_layers(model.embed(part), 0, model.num_layers, cache) for part in TOKENS.split(rows)]
        return model.logits(torch.cat(hidden))


@needs_native
@pytest.mark.parametrize("variant", RUNNABLE)
def test_products_of_rounded_rows(variant: str) -> None:
    """In any number of rows, on one thread or two: the same bits, and nearly those of float64.

    From 32 rows on, variants with few registers convert weights to float32 first.
    """
    torch.manual_seed(0)
    with use(variant):
        for out, width in ((5, 3), (37, 61), (96, 128)):
            plain = NativeLinear(torch.randn(out, width).bfloat16(), torch.randn(out))
            linear = plain.rounding_rows(True)
            assert linear.rounds_rows and not plain.rounds_rows and linear.stored is plain.stored
            x, residual = torch.randn(70, width) * torch.logspace(-3, 3, 70)[:, None], torch.randn(70, out)
            alone = torch.cat([linear(row) for row in x.split(1)])
            for rows in (2, 3, 7, 33, 70):
                for threads in (1, 2):
                    with on_threads(threads):
                        assert torch.equal(linear(x[:rows]), alone[:rows])
            assert torch.equal(linear.add_to(residual, x)[5:6], linear.add_to(residual[5:6], x[5:6]))
            assert torch.equal(alone, plain(to_bfloat16(x)))
            exact = to_bfloat16(x).double() @ linear.weight.double().T + linear.tensors[1].double()
            size = x.abs().double() @ linear.weight.abs().double().T
            assert ((alone - exact).abs() <= 1e-6 * size + 1e-6).all()
            with operators_only():
                assert ((linear(x) - exact).abs() <= 1e-6 * size + 1e-6).all()


@needs_native
def test_ties_go_to_even_and_what_is_no_number_stays_so() -> None:
    linear = NativeLinear(torch.ones(1, 1).bfloat16()).rounding_rows(True)
    one = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32).view(torch.float32)
    assert linear(one[:, None]).flatten().tolist() == [1.0, 1.015625, 1.0078125, 1.0]
    x = torch.randn(4, 19)
    linear = NativeLinear(torch.ones(3, 19).bfloat16()).rounding_rows(True)
    whole = linear(x)
    x[1, 18], x[2, 0] = torch.nan, -torch.inf
    spoilt = linear(x)
    assert spoilt[1].isnan().all() and (spoilt[2] == -torch.inf).all()
    assert torch.equal(spoilt[[0, 3]], whole[[0, 3]])


@pytest.mark.parametrize("layout", [*LAYOUTS, "half"])
def test_the_model_is_the_study_s_with_one_part(layout: Layout) -> None:
    """`row-parts` cuts rows in transformers' model in float32. Numbers between two of bfloat16 may be rounded either way."""
    model = rounding(layout)
    subject = CutRows(network().float().eval())
    text = [*TOKENS.tolist(), 0]
    expected = subject.distributions(text, 40, parts(1))
    whole = subject.distributions(text, 40, None)
    found = logits(model).double().log_softmax(-1)
    assert (found - expected).abs().mean() < 0.1 * (whole - expected).abs().mean()
    assert (found - expected).abs().max() < 0.05
    plain = model.with_arithmetic("float32")
    assert plain.arithmetic == "float32" and model.arithmetic == "bfloat16"
    torch.testing.assert_close(logits(plain).double().log_softmax(-1), whole, rtol=0, atol=1e-4)


@needs_native
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2),
    policy=st.sampled_from(["ls:1-4", "ls:3-2", "dv:2", "auto:cost=layers", "bits:8-3", "bits:4-2", "copy:4"]),
    kept=st.integers(1, 12),
)
def test_whatever_drafts_the_text_is_the_model_s_own(seed: int, policy: str, kept: int) -> None:
    """Alone, in company, and where a kept text is continued."""
    model = rounding("native", seed)
    assert torch.equal(logits(model, 1), logits(model, 7))
    generator = SelfSpecGenerator(model)
    plain = SelfSpecGenerator(model, prefix_cache=0)
    expected = [plain.generate(prompt, max_new_tokens=16, policy="ar").new_tokens for prompt in PROMPTS]
    for result, text in zip(generator.generate_batch(PROMPTS, max_new_tokens=16, policy=policy), expected):
        assert result.new_tokens == text
    first = generator.generate(PROMPTS[0], max_new_tokens=16, policy=policy)
    assert first.new_tokens == expected[0]
    again = [*PROMPTS[0], *expected[0][:kept], 3]
    found = generator.generate(again, max_new_tokens=8, policy=policy)
    assert found.stats.num_reused_tokens > 0
    assert found.new_tokens == plain.generate(again, max_new_tokens=8, policy="ar").new_tokens


def test_every_road_to_it(tmp_path: Path) -> None:
    """A transformers model, one that is converted, one that is loaded, with adapters and after them, and a benchmark's."""
    llama = network()
    llama.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu", arithmetic="bfloat16")  # float32 arithmetic, weights kept in bfloat16
    expected = SelfSpecGenerator(loaded).generate(PROMPTS[0], max_new_tokens=16, policy="ar").new_tokens
    roads = (
        SelfSpecGenerator(llama, arithmetic="bfloat16"),
        SelfSpecGenerator(from_transformers(llama), arithmetic="bfloat16"),
        SelfSpecGenerator(
            load_model(tmp_path, dtype="bfloat16", device="cpu", arithmetic="bfloat16").with_adapters({})
        ),
        SelfSpecGenerator(open_model(str(tmp_path), "bfloat16", "cpu", "bfloat16")),
    )
    for generator in roads:
        assert arithmetic_of(generator.model) == {"arithmetic": "bfloat16"}
        assert generator.generate(PROMPTS[0], max_new_tokens=16, policy="ls:2-3").new_tokens == expected
    generator = SelfSpecGenerator(loaded, arithmetic="float32")
    assert generator.model.arithmetic == "float32" and arithmetic_of(generator.model) == {}


def test_where_it_makes_no_sense(tmp_path: Path) -> None:
    half = from_transformers(network(dtype=torch.float16))
    full = from_transformers(tiny_llama())
    wide = from_transformers(network(dtype=torch.float64))
    few = from_transformers(network(), layout="int4")
    for model in (half, full, wide, few):
        with pytest.raises(
            ValueError, match=r"needs weights kept in bfloat16, not .*: load the model with dtype='bfloat16'"
        ):
            model.with_arithmetic("bfloat16")
        assert model.with_arithmetic("float32") is model
    for dtype in ("float16", "float64", "int8", "int4"):
        with pytest.raises(ValueError, match=f"not dtype='{dtype}'"):
            load_model(tmp_path / "none", dtype=dtype, device="cpu", arithmetic="bfloat16")
    with pytest.raises(ValueError, match="arithmetic must be float32 or bfloat16, got 'float16'"):
        load_model(DEMO_PATH, arithmetic="float16")
    on_cuda = from_transformers(network())
    on_cuda.layer_devices = (torch.device("cuda"),) * on_cuda.num_layers
    with pytest.raises(ValueError, match="is for CPUs, and on cuda dtype='bfloat16' rounds all arithmetic already"):
        on_cuda.with_arithmetic("bfloat16")


def test_the_commands() -> None:
    run = ["generate", "def f", "--max-new-tokens", "4", "--policy", "ar", "--json", "--arithmetic", "bfloat16"]
    result = CliRunner().invoke(app, [*run, "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    wrong = CliRunner().invoke(app, [*run, "--dtype", "int8"])
    assert wrong.exit_code == 2 and "error: arithmetic='bfloat16' needs weights kept in bfloat16" in wrong.stderr
    wrong = CliRunner().invoke(app, ["verify", "--arithmetic", "bfloat16"])
    assert wrong.exit_code == 2 and "add --dtype bfloat16" in wrong.stderr
