"""Captured rounds with CUDA graphs: run by `pytest -m gpu`, on a machine with a CUDA device; skipped without one."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.backends import cuda as backends
from transformers import GenerationConfig

from layerskip_models import from_transformers
from layerskip_models.kv_cache import KVCache
from policies import RoundRecord
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.runners.choice import CaptureError
from selfspec.engine.runners.cuda_graph.buffers import StaticPass
from selfspec.engine.runners.cuda_graph.capture import Captures
from selfspec.engine.runners.cuda_graph.forward import StaticForward
from selfspec.engine.runners.cuda_graph.graph import CudaGraph, GraphSpace
from selfspec.engine.runners.cuda_graph.paged_attention import (
    PAGE,
    Pages,
    _expected,
    _has_expected_schema,
    attends_by_pages,
)
from selfspec.engine.runners.cuda_graph.stream_pool import MAX_STREAMS
from selfspec.engine.runners.cuda_graph.streams import CudaStreams
from selfspec.engine.torch_mode import engine_mode
from test_captured import OPTIONS, PROMPT, pair
from test_cuda_paths import SHAPES, TEXT
from test_streams import run
from tiny_llama import full_logits, reference_greedy, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with warnings.catch_warnings():  # the first use of this mode warns that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")
    return torch.device("cuda")


takes_pages = pytest.mark.skipif(not _has_expected_schema(), reason="flash attention of this PyTorch takes no pages")


@pytest.mark.parametrize("options", [*OPTIONS.values()][:3], ids=[*OPTIONS][:3])
def test_graphs_give_the_model_s_own_text(options: dict[str, Any], cuda: torch.device) -> None:
    """Every policy in float64, where equality is exact, on one cache."""
    llama = tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3)
    expected = reference_greedy(
        llama, PROMPT, max_new_tokens=40, **{k: v for k, v in options.items() if k != "do_sample"}
    )
    engine = SelfSpecGenerator(from_transformers(llama.to(cuda)))
    assert engine.runner == "captured"
    for name in EVERY_POLICY:
        result = engine.generate(PROMPT, max_new_tokens=40, policy=named_policy(name, 2, engine.model), **options)
        assert result.new_tokens == expected, name
    assert engine.runner == "captured"  # graphs were not given up on the way


def test_graphs_sample_as_the_eager_runner_does(cuda: torch.device) -> None:
    llama = tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3).to(cuda)
    eager, captured = pair(llama)
    for seed in range(5):
        for policy in ("ar", "ls:1-3", "dv:2"):
            options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "seed": seed, "top_k": 8}
            theirs = eager.generate(PROMPT, policy=named_policy(policy, 2, eager.model), **options)
            ours = captured.generate(PROMPT, policy=named_policy(policy, 2, captured.model), **options)
            assert ours.new_tokens == theirs.new_tokens


def test_graphs_in_bfloat16_take_the_argmax_or_a_near_tie(cuda: torch.device) -> None:
    for seed in range(6):
        llama = tiny_llama(num_layers=4, dtype=torch.bfloat16, seed=seed, heads=8, kv_heads=2, head_dim=16).to(cuda)
        engine = SelfSpecGenerator(from_transformers(llama))
        for policy in ("ar", "ls:1-4", "auto:cost=layers"):
            new = engine.generate(PROMPT, max_new_tokens=40, policy=policy).new_tokens
            with torch.no_grad():
                logits = llama(torch.tensor([PROMPT + new], device=cuda), use_cache=False).logits[0].float().cpu()
            rows = logits[len(PROMPT) - 1 : -1]
            gaps = rows.max(dim=-1).values - rows.gather(-1, torch.tensor(new)[:, None])[:, 0]
            assert float(gaps.max()) <= 0.3


class NoWaiting:
    """Makes every call that waits for the whole device an error, from the first token until the text nears its end."""

    def __init__(self) -> None:
        self.pieces = 0

    def put(self, value: Tensor) -> None:
        self.pieces += 1
        if self.pieces == 2:  # the prompt and the first token
            torch.cuda.set_sync_debug_mode("error")

    def on_round(self, record: RoundRecord) -> None:
        if record.num_committed_before > 20:
            torch.cuda.set_sync_debug_mode("default")

    def end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_a_warm_graph_runner_never_waits_for_the_device(cuda: torch.device) -> None:
    """All reads go through pinned memory and events: PyTorch's own watch over synchronising calls stays silent."""
    engine = SelfSpecGenerator(from_transformers(tiny_llama(seed=3).to(cuda)))
    for policy in ("ar", "ls:2-3", "dv:2"):
        engine.generate(PROMPT, max_new_tokens=40, policy=policy)
        engine.generate(PROMPT, max_new_tokens=40, policy=policy, streamer=NoWaiting())


def test_stop_strings_and_time_limits_never_wait_for_the_device(cuda: torch.device) -> None:
    """They are decided on the host's copy of the text."""
    engine = SelfSpecGenerator(from_transformers(tiny_llama(seed=3).to(cuda)), tiny_tokenizer())
    for policy in ("ar", "ls:2-3", "dv:2"):
        for streamer in (None, NoWaiting()):
            config = GenerationConfig(max_time=1000.0, max_new_tokens=40)
            engine.generate(
                PROMPT, generation_config=config, policy=policy, stop_strings="figfigfigfig", streamer=streamer
            )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=[*OPTIONS])
def test_what_is_learned_is_what_the_eager_runner_learns(options: dict[str, Any], cuda: torch.device) -> None:
    """Shadow tokens, their confidences and target tokens, as a policy reads them."""
    eager, captured = pair(tiny_llama(dtype=torch.float64, late_scale=0.6, seed=3).to(cuda))
    assert run(captured, slice(None), **options) == run(eager, slice(None), **options)
    assert captured.runner == "captured"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_rows_in_any_number_on_cuda(heads: int, kv_heads: int, dtype: torch.dtype, cuda: torch.device) -> None:
    """Attention of one row, of several at the text's beginning and behind others; rotary in real numbers."""
    llama = tiny_llama(heads=heads, kv_heads=kv_heads, dtype=dtype, seed=3)
    expected = full_logits(llama, TEXT)
    model = from_transformers(llama.to(cuda))
    cache, static_cache = KVCache(model, 16), KVCache(model, 16)
    static_cache.keys.zero_()
    static_cache.values.zero_()
    forward = StaticForward(model, static_cache)
    assert not model.rotary.is_complex()
    with engine_mode(cuda):
        assert not backends.cudnn_sdp_enabled()
        hidden = model.embed(torch.tensor(TEXT, device=cuda))
        states, static = [], []
        for start, stop in ((0, 3), (3, 4), (4, 7)):
            rows = hidden[start:stop]
            states.append(model.run_layers(rows, 0, 4, cache))
            static.append(forward.run(rows, 0, 4, torch.arange(start, stop, device=cuda), 16))
        for found in (states, static):
            bound = 0.3 if dtype == torch.bfloat16 else 1e-3
            torch.testing.assert_close(model.logits(torch.cat(found)).cpu(), expected, rtol=0, atol=bound)


@takes_pages
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("window", [None, 1, 200])
def test_attention_by_pages_is_that_of_sdpa(
    window: int | None, heads: int, kv_heads: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    """One capture for every length, on 16 pages: keys are divided among blocks, of which most have none in a short text."""
    with torch.inference_mode():
        keys = torch.randn(kv_heads, 16 * PAGE, 64, device=cuda, dtype=dtype).mT
        values = torch.randn(kv_heads, 16 * PAGE, 64, device=cuda, dtype=dtype)
        pages = Pages([keys], [values])
        for rows in (1, 3, 16):
            query = torch.randn(rows, heads, 64, device=cuda, dtype=dtype)
            used = torch.full((1,), 700, dtype=torch.int32, device=cuda)
            out = torch.zeros(rows, heads * 64, device=cuda, dtype=dtype)

            def body(query: Tensor = query, used: Tensor = used, out: Tensor = out) -> None:
                out.copy_(pages.attend(0, query, pages.bounds(query.shape[0]), used, window))

            captures = Captures(cuda, (), CudaStreams(cuda))
            for length in (16, 255, 257, 700, 16 * PAGE):
                used.fill_(length)
                captures.run("attend", body)
                expected = _expected(query.float(), keys.float(), values.float(), length, window)
                torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
            assert captures.num_captures == 1


@takes_pages
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_texts_by_pages_go_on_without_a_warning(dtype: torch.dtype, cuda: torch.device) -> None:
    llama = tiny_llama(dtype=dtype, seed=3, heads=8, kv_heads=2, head_dim=16, max_position_embeddings=1024).to(cuda)
    engine = SelfSpecGenerator(from_transformers(llama))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attends_by_pages(engine.model)
        for prompt in (PROMPT, PROMPT * 90):
            for policy in ("ar", "ls:2-4"):
                assert engine.generate(prompt, max_new_tokens=20, policy=policy).stats.runner == "captured"


def test_a_capture_that_fails_costs_a_warning(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that waits for the device: allowed while warming up, an error while CUDA captures it."""
    llama = tiny_llama(dtype=torch.float64, seed=3)
    expected = reference_greedy(llama, PROMPT, max_new_tokens=25)
    engine = SelfSpecGenerator(from_transformers(llama.to(cuda)))
    rows_of = StaticPass._rows

    def waiting(self: StaticPass, rows: int) -> Tensor:
        self.logits.sum().item()
        return rows_of(self, rows)

    monkeypatch.setattr(StaticPass, "_rows", waiting)
    with pytest.warns(RuntimeWarning, match="capturing"):
        result = engine.generate(PROMPT, max_new_tokens=25, policy="ls:2-3")
    assert result.new_tokens == expected
    assert engine.runner == "eager"
    assert engine.generate(PROMPT, max_new_tokens=25, policy="ls:2-3").new_tokens == expected


def test_a_replay_that_does_nothing_costs_a_warning(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    expected = reference_greedy(llama, PROMPT, max_new_tokens=25)
    engine = SelfSpecGenerator(from_transformers(llama.to(cuda)))
    monkeypatch.setattr(CudaGraph, "replay", lambda self: None)
    with pytest.warns(RuntimeWarning, match="differ from the eager ones"):
        result = engine.generate(PROMPT, max_new_tokens=25, policy="ls:2-3")
    assert (result.new_tokens, engine.runner) == (expected, "eager")


def test_threads_capture_one_after_the_other(cuda: torch.device) -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3)
    expected = reference_greedy(llama, PROMPT, max_new_tokens=25)
    llama = llama.to(cuda)
    engines = [SelfSpecGenerator(from_transformers(llama)) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda e: e.generate(PROMPT, max_new_tokens=25, policy="ls:2-3").new_tokens, engines))
    assert found == [expected] * 4
    assert {engine.runner for engine in engines} == {"captured"}


def test_calls_on_streams_of_their_own_come_in_order(cuda: torch.device) -> None:
    """One generator, each call on another stream: none waits for the one before but through the runner."""
    llama = tiny_llama(dtype=torch.float64, seed=3)
    expected = reference_greedy(llama, PROMPT, max_new_tokens=25)
    engine = SelfSpecGenerator(from_transformers(llama.to(cuda)))
    torch.cuda.synchronize(cuda)
    for _ in range(5):
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            assert engine.generate(PROMPT, max_new_tokens=25, policy="ls:2-3").new_tokens == expected


def test_shared_weights_take_no_memory_and_keep_graphs(cuda: torch.device) -> None:
    llama = tiny_llama(dtype=torch.float64, seed=3, vocab_size=4096, hidden_size=256, intermediate_size=512).to(cuda)
    sizes = sum(parameter.nbytes for parameter in llama.parameters())
    before = torch.cuda.memory_allocated()
    model = from_transformers(llama, share=True)
    assert torch.cuda.memory_allocated() - before < sizes / 10
    engine = SelfSpecGenerator(llama)
    for _ in range(2):
        expected = reference_greedy(deepcopy(llama).cpu(), PROMPT, max_new_tokens=20)
        assert engine.generate(PROMPT, max_new_tokens=20, policy="ls:2-3").new_tokens == expected
        result = engine.generate(PROMPT, max_new_tokens=20, policy="ls:2-3")
        shared, captures = engine.model, result.stats.num_captures
        assert captures == 0
        llama(input_ids=torch.tensor([PROMPT], device=cuda), labels=torch.tensor([PROMPT], device=cuda)).loss.backward()
        torch.optim.AdamW(llama.parameters(), lr=0.01, fused=True).step()
    result = engine.generate(PROMPT, max_new_tokens=20, policy="ls:2-3")
    assert result.new_tokens == reference_greedy(deepcopy(llama).cpu(), PROMPT, max_new_tokens=20)
    assert engine.model is shared and result.stats.num_captures == 0
    del model


def products(num_layers: int, graphs: int) -> tuple[list[Any], Tensor, Tensor, list[Tensor]]:
    """Bodies of matrix products as large as a 7B model's, and what each leaves in the output."""
    weights = torch.randn(num_layers, 11008, 4096, device="cuda", dtype=torch.bfloat16) / 64
    x, y = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16), torch.zeros(8, 4096, device="cuda")

    def body(index: int) -> Any:
        def run() -> None:
            rows = 1 + index % 8
            for weight in weights:
                y[:rows].copy_((x[:rows] @ weight.T) @ weight)

        return run

    bodies, expected = [body(index) for index in range(graphs)], []
    for run_body in bodies:
        y.zero_()
        run_body()
        expected.append(y.clone())
    return bodies, x, y, expected


def replays_agree(captures: Captures, bodies: list[Any], y: Tensor, expected: list[Tensor], first: int = 0) -> None:
    """Run the bodies from `first` on, each under its own key."""
    for key in range(first, len(bodies)):
        y.zero_()
        captures.run(key, bodies[key])
        torch.testing.assert_close(y, expected[key], rtol=0.05, atol=0.5)
        torch.cuda.empty_cache()  # what is freed is gone


@pytest.mark.usefixtures("cuda")
def test_graphs_that_are_given_up_leave_the_others_whole() -> None:
    """Four at a time of eight: with each that goes, PyTorch frees the workspace of the stream that all are captured on."""
    with torch.inference_mode():
        bodies, _, y, expected = products(2, 8)
        captures = Captures(y.device, (), CudaStreams(y.device), max_captures=4)
        for _ in range(3):
            replays_agree(captures, bodies, y, expected)
            replays_agree(captures, bodies, y, expected, first=4)
    torch.cuda.synchronize()


def test_four_captures_at_a_time_and_the_same_text(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 4096 x 11008 in bfloat16, whose products take a workspace."""
    shape: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "kv_heads": 32}
    llama = tiny_llama(num_layers=4, head_dim=128, dtype=torch.bfloat16, seed=3, **shape).to(cuda)
    eager = SelfSpecGenerator(from_transformers(llama), runner="eager")
    monkeypatch.setattr(Captures.__init__, "__kwdefaults__", {"max_captures": 4})
    captured = SelfSpecGenerator(from_transformers(llama, share=True))
    made = 0
    for policy in ("ar", "ls:2-3", "dv:2"):
        theirs = eager.generate(PROMPT, max_new_tokens=20, policy=policy).new_tokens
        ours = captured.generate(PROMPT, max_new_tokens=20, policy=policy)
        made += ours.stats.num_captures
        assert len(ours.new_tokens) == len(theirs)
    assert made > 4
    assert captured.runner == "captured"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # the compiler's own
def test_a_function_compiled_with_graphs_of_its_own_between_two_calls(cuda: torch.device) -> None:
    """PyTorch's compiler frees the workspaces of all streams where it captures."""
    llama = tiny_llama(
        num_layers=4, hidden_size=1024, intermediate_size=4096, heads=8, kv_heads=8, head_dim=128, seed=3
    )
    engine = SelfSpecGenerator(from_transformers(llama.to(cuda)))
    before = engine.generate(PROMPT, max_new_tokens=20, policy="ls:2-3").new_tokens
    weight = torch.randn(4096, 4096, device=cuda)
    compiled = torch.compile(lambda x: (x @ weight).relu() @ weight, mode="reduce-overhead")
    for _ in range(4):
        compiled(torch.randn(8, 4096, device=cuda))
    torch.cuda.empty_cache()
    result = engine.generate(PROMPT, max_new_tokens=20, policy="ls:2-3")
    assert (result.new_tokens, result.stats.num_captures) == (before, 0)
    torch.cuda.synchronize()


@pytest.mark.usefixtures("cuda")
def test_a_capture_that_fails_gives_its_memory_back() -> None:
    def waits() -> None:
        float(torch.ones(1 << 20, device="cuda").sum())

    captures = Captures(torch.device("cuda"), (), CudaStreams(torch.device("cuda")))
    with pytest.raises(CaptureError, match=r"stream is capturing|previous error"):
        captures.run("waits", waits)
    del captures
    torch.cuda.empty_cache()  # raises where the allocator still believes that something is captured
    before = torch.cuda.memory_reserved()
    held = torch.ones(1 << 26, device="cuda")
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    assert torch.rand(2, device="cuda").shape == (2,)


@pytest.mark.usefixtures("cuda")
def test_streams_that_are_captured_on_are_nobody_else_s() -> None:
    spaces: list[GraphSpace] = []
    with pytest.raises(RuntimeError, match="are in use"):  # after a failed capture, its stream is never given out again
        while len(spaces) <= MAX_STREAMS:
            spaces.append(GraphSpace(torch.device("cuda", 0)))
    captured_on = {space.stream.cuda_stream for space in spaces}
    others = {torch.cuda.Stream("cuda:0").cuda_stream for _ in range(2 * MAX_STREAMS)}
    assert len(captured_on) == len(spaces) > MAX_STREAMS // 2
    assert not captured_on & others
