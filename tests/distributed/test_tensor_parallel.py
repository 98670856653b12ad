"""A model in several processes says what it says in one: texts, samples, memory; and one error ends them all."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from layerskip_models import LayerSkipModel, load_model
from layerskip_models.exits.adapter import LOW_RANK, STEERED
from layerskip_models.families import FAMILIES
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel.shard_loading import load_shard
from layerskip_models.parallel.shard_plan import Part, ShardPlan
from rank_processes import RankFailed, on_ranks, results_of
from scripted_policies import EVERY_POLICY, named_policy
from selfspec import SelfSpecGenerator
from selfspec.distributed.launch import divides
from selfspec.engine.runners.cuda_graph.capture import RecordedOperations
from test_families import reference
from tests.fuzz.random_adapters import adapted
from tiny_llama import full_logits, tiny_llama, tiny_tokenizer

PROMPTS = ([5, 1, 7], [9, 9, 3, 0, 23], [2])
NEW = 12
NEAR_TIE = 1e-4
REPEATING = [name for name in EVERY_POLICY if "measured" not in name]


def llama(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """With an odd vocabulary, biases everywhere, an inner width that 4 does not divide, and two key-value heads."""
    return tiny_llama(
        num_layers=4, heads=4, kv_heads=2, intermediate_size=26, vocab_size=27, attention_bias=True, mlp_bias=True,
        late_scale=0.4, dtype=dtype, seed=11,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("divided")
    llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def _generator(path: Path, dtype: str, divided: bool, form: str = LOW_RANK) -> SelfSpecGenerator:
    """With adapters at two exits."""
    load = load_shard if divided else load_model
    model = adapted(load(path, dtype=dtype, device="cpu"), [1, 3], form=form)
    return SelfSpecGenerator(model, tiny_tokenizer(), prefix_cache=0)


def said(path: Path, dtype: str, divided: bool, policies: list[str]) -> dict[str, Any]:
    """Texts by every policy, greedy and drawn, alone, in company, and behind a kept beginning; of one, by steered exits."""
    generator = _generator(path, dtype, divided, STEERED if len(policies) == 1 else LOW_RANK)
    model = generator.model
    texts: dict[str, Any] = {}
    for index, name in enumerate(policies):
        exit_layer, prompt = 1 + index % 3, PROMPTS[index % 3]
        make = partial(named_policy, name, exit_layer, model)
        greedy = generator.generate(prompt, max_new_tokens=NEW, policy=make())
        drawn = generator.generate(prompt, max_new_tokens=NEW, policy=make(), do_sample=True, top_k=9, seed=index)
        texts[name] = greedy.new_tokens, drawn.new_tokens, drawn.stats.num_drafted
    if len(policies) == 1:  # the rest is looked at with two ranks
        return texts
    batch = generator.generate_batch(
        [*PROMPTS, *PROMPTS], batch_size=4, max_new_tokens=NEW, policy="ls:2-3", do_sample=[False] * 3 + [True] * 3,
        seed=[None] * 3 + [4, 5, 6],
    )  # fmt: skip
    texts["batch"] = [result.new_tokens for result in batch]
    kept = SelfSpecGenerator(model, tiny_tokenizer(), "ls:2-3", prefix_cache="1MB")
    first = kept.generate(PROMPTS[1], max_new_tokens=NEW)
    again = kept.generate(first.sequences[0, :-3], max_new_tokens=3)
    texts["kept"] = first.new_tokens, again.new_tokens, again.stats.num_reused_tokens > 0
    if len(policies) > 4:
        texts["auto"] = generator.generate(PROMPTS[0], max_new_tokens=NEW, policy="auto").new_tokens
    stopped = generator.generate(PROMPTS[0], max_new_tokens=NEW, stop_strings=["a"], policy="ls:2-3")
    texts["stopped"] = stopped.new_tokens
    return texts


def told(path: Path, dtype: str, policies: list[str]) -> dict[str, Any]:
    """The same on a rank, with what it holds."""
    found = said(path, dtype, True, policies)
    model = load_shard(path, dtype=dtype, device="cpu")
    unseeded = _generator(path, dtype, True).generate(PROMPTS[0], max_new_tokens=NEW, do_sample=True, policy="ls:1-3")
    large = torch.full((300, 100), 1.0 + model.ranks.rank / 3, dtype=torch.float64)  # more than is gathered
    with torch.inference_mode():
        states = model.embed(torch.tensor([0, 5, 13, 26]))
    return {
        "texts": found,
        "unseeded": unseeded.new_tokens,
        "layer_bytes": model.layer_bytes,
        "head_bytes": model.head_bytes,
        "sums": (model.ranks.add_up(large.clone()).tolist(), model.ranks.add_up(large[:3, :9].clone()).tolist()),
        "agreed": model.agree([float(model.ranks.rank)]),
        "embedded": states.tolist(),
    }


@pytest.mark.parametrize(
    ("ranks", "policies"),
    [
        (2, ["ls:{E}-4", "del", "pacer"]),
        (4, ["spide:{E}"]),
        pytest.param(2, REPEATING, marks=pytest.mark.slow),
        pytest.param(4, REPEATING, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_one_process_in_float64(ranks: int, policies: list[str], folder: Path) -> None:
    """Greedy and drawn, by every policy. With 4 ranks two share a key-value head."""
    whole = load_model(folder, dtype="float64", device="cpu")
    found = results_of(ranks, told, folder, "float64", policies)
    expected = said(folder, "float64", False, policies)
    for rank in found:
        assert rank["texts"] == expected
        assert rank["unseeded"] == found[0]["unseeded"]
        assert rank["sums"] == found[0]["sums"]  # every bit
        assert rank["agreed"] == [0.0]
    rows = torch.tensor(found[0]["embedded"], dtype=torch.float64)
    assert torch.equal(rows, whole.embed(torch.tensor([0, 5, 13, 26])))
    most = max(rank["layer_bytes"] for rank in found)
    norms = 2 * 16 * 8
    shared = 16 * 8 * 16 * 2 * (ranks == 4) * 8 // ranks  # key-value heads that two ranks hold
    assert most - norms <= (whole.layer_bytes - norms) / ranks * 1.12 + shared
    assert max(rank["head_bytes"] for rank in found) < whole.head_bytes / ranks * 1.5


def test_float32_takes_the_argmax_or_a_near_tie(folder: Path) -> None:
    policies = ["ls:{E}-4", "del"]
    found = results_of(2, said, folder, "float32", True, policies)
    assert found[0] == found[1]
    for index, name in enumerate(policies):
        prompt, text = PROMPTS[index % 3], found[0][name][0]
        logits = full_logits(llama(torch.float32), [*prompt, *text])[len(prompt) - 1 : -1]
        behind = logits.amax(dim=-1) - logits.gather(-1, torch.tensor(text).unsqueeze(-1)).squeeze(-1)
        assert float(behind.max()) < NEAR_TIE


def _rounded_drafts(path: Path, arithmetic: str) -> list[tuple[list[int], int, int]]:
    """Texts that draft in fewer bits, alone and in company; and how much was drafted and accepted."""
    model = load_shard(path, dtype=arithmetic, device="cpu", arithmetic=arithmetic)
    generator = SelfSpecGenerator(model, prefix_cache=0)
    found = []
    others = ("bits:8-3", "copy:3+bits:4-2") if arithmetic == "float32" else ()
    for policy in ("ar", "bits:4-4", "bits:8-4,layer=2", *others):
        alone = [generator.generate(prompt, max_new_tokens=NEW, policy=policy) for prompt in PROMPTS[:2]]
        for result in [*alone, *generator.generate_batch(PROMPTS[:2], max_new_tokens=NEW, policy=policy)]:
            found.append((result.new_tokens, result.stats.num_drafted, result.stats.num_accepted))
    return found


def _logits(model: LayerSkipModel) -> Tensor:
    """The logits after each token of a prompt that has every token once."""
    tokens = torch.arange(27)
    with torch.inference_mode():
        return model.logits(model.run_layers(model.embed(tokens), 0, model.num_layers, KVCache(model, 27)))


def _with_either_arithmetic(path: Path) -> tuple[list[list[tuple[list[int], int, int]]], list[list[float]]]:
    """`_rounded_drafts`, and logits where rows are rounded."""
    model = load_shard(path, dtype="bfloat16", device="cpu", arithmetic="bfloat16")
    return [_rounded_drafts(path, arithmetic) for arithmetic in ("float32", "bfloat16")], _logits(model).tolist()


def test_drafts_in_fewer_bits_change_nothing_and_rows_may_be_rounded(folder: Path) -> None:
    """Each process rounds its own part of the weights, and its own part of a row.

    Its sums are in another order than those of one process, after which a row's number that lies between two of bfloat16 may
    be rounded the other way.
    """
    found = results_of(2, _with_either_arithmetic, folder)
    assert found[0] == found[1]
    per_policy = 2 * len(PROMPTS[:2])
    for texts in found[0][0]:
        plain = [text for text, *_ in texts[:per_policy]]
        for index, (text, *_) in enumerate(texts):
            assert text == plain[index % per_policy]
        drafted, accepted = (sum(one[at] for one in texts) for at in (1, 2))
        assert 0.3 * drafted < accepted < drafted
    whole = load_model(folder, dtype="bfloat16", device="cpu", arithmetic="bfloat16")
    expected, plainly = _logits(whole), _logits(whole.with_arithmetic("float32"))
    error = (torch.tensor(found[0][1]) - expected).abs().mean()
    assert error < 0.1 * (plainly - expected).abs().mean()


def _captured(path: Path) -> list[tuple[list[int], str]]:
    """Rounds replayed from what was noted, sums among it."""
    generator = SelfSpecGenerator(load_shard(path, dtype="float64", device="cpu"), runner="captured")
    found = []
    for policy in ("ls:2-3", "spide:1"):
        for options in ({}, {"do_sample": True, "top_k": 9, "seed": 3}):
            result = generator.generate(PROMPTS[0], max_new_tokens=NEW, policy=policy, **options)
            found.append((result.new_tokens, result.stats.runner))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("small_captures")
def test_captured_rounds_hold_the_sums(folder: Path) -> None:
    """The stand-in for graphs replays them on every rank, and notes that its first rounds are those of eager passes."""
    alone = SelfSpecGenerator(load_model(folder, dtype="float64", device="cpu"), runner="captured")
    greedy = alone.generate(PROMPTS[0], max_new_tokens=NEW, policy="ls:2-3").new_tokens
    found = results_of(2, _captured, folder)
    assert found[0] == found[1]
    assert {runner for _, runner in found[0]} == {"captured"}
    assert found[0][0][0] == found[0][2][0] == greedy
    drawn = alone.generate(PROMPTS[0], max_new_tokens=NEW, policy="ls:2-3", do_sample=True, top_k=9, seed=3)
    assert found[0][1][0] == drawn.new_tokens


def _captured_with_a_fault(path: Path) -> tuple[list[list[int]], str, list[str]]:
    """On rank 1 alone the fifth capture fails, once it has run."""
    model = load_shard(path, dtype="float64", device="cpu")
    made = []
    if model.ranks.rank == 1:
        init = RecordedOperations.__init__

        def capture(self: RecordedOperations, body: Callable[[], object]) -> None:
            made.append(1)
            init(self, body)
            if len(made) == 5:
                raise RuntimeError("no memory for a graph")

        RecordedOperations.__init__ = capture  # type: ignore[method-assign]
    generator = SelfSpecGenerator(model, runner="captured")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        texts = [generator.generate(PROMPTS[0], max_new_tokens=NEW, policy="ls:2-3").new_tokens for _ in "ab"]
    return texts, generator.runner, [str(one.message) for one in warned if one.category is RuntimeWarning]


@pytest.mark.usefixtures("small_captures")
def test_a_capture_that_fails_on_one_rank_makes_all_of_them_eager(folder: Path) -> None:
    whole = SelfSpecGenerator(load_model(folder, dtype="float64", device="cpu"))
    expected = whole.generate(PROMPTS[0], max_new_tokens=NEW, policy="ls:2-3").new_tokens
    found = results_of(2, _captured_with_a_fault, folder)
    assert [(texts, runner) for texts, runner, _ in found] == [([expected] * 2, "eager")] * 2
    assert ["another process" in warned and "no memory" not in warned for *_, (warned,) in found] == [True, False]


def _of_families(paths: dict[str, Path], divided: bool) -> dict[str, list[int]]:
    load = load_shard if divided else load_model
    return {
        kind: SelfSpecGenerator(load(path, dtype="float64", device="cpu"))
        .generate(PROMPTS[1], max_new_tokens=12, policy="ls:1-3", eos_token_id=[])
        .new_tokens
        for kind, path in paths.items()
    }


def test_every_family_can_be_divided(tmp_path: Path) -> None:
    paths = {}
    for kind in FAMILIES:
        model = next(model for model in (reference(kind, seed) for seed in range(9)) if _divisible(model.config))
        paths[kind] = tmp_path / kind
        model.save_pretrained(paths[kind])
    assert results_of(2, _of_families, paths, True) == [_of_families(paths, False)] * 2


def _divisible(config: Any) -> bool:
    try:
        ShardPlan.of(config, 0, 2)
    except ValueError:
        return False
    return True


# How it ends


def _disagree(path: Path) -> list[int]:
    model = load_shard(path, dtype="float64", device="cpu")
    prompt = [5, 1, 7 if model.ranks.rank == 0 else 8]
    return SelfSpecGenerator(model).generate(prompt, max_new_tokens=8, policy="ls:1-3").new_tokens


def _decide_otherwise(path: Path) -> list[int]:
    """One rank's hidden states go wrong in the middle of a text."""
    model = load_shard(path, dtype="float64", device="cpu")
    if model.ranks.rank == 1:
        logits = model.vocabulary.logits
        model.vocabulary.logits = lambda head, hidden: -logits(head, hidden)  # type: ignore[method-assign]
    options = {"max_new_tokens": 8, "policy": "ls:1-3", "repetition_penalty": 1.1}
    return SelfSpecGenerator(model).generate([5, 1], **options).new_tokens


def _die(path: Path) -> list[int]:
    model = load_shard(path, dtype="float64", device="cpu")
    if model.ranks.rank == 1:
        os._exit(3)
    return SelfSpecGenerator(model).generate([5, 1], max_new_tokens=8, policy="ls:1-3").new_tokens


def test_ranks_that_were_called_otherwise_or_decide_otherwise_end_together(folder: Path) -> None:
    for function in (_disagree, _decide_otherwise):
        found = on_ranks(2, function, folder)
        assert all(isinstance(one, RankFailed) for one in found)
        assert all(str(one).startswith("RankError: rank 1 decided otherwise than rank 0") for one in found), found


def test_a_rank_that_dies_ends_the_others(folder: Path) -> None:
    alive, dead = on_ranks(2, _die, folder)
    assert dead is None
    assert "another process ended, or did not answer within 120 seconds" in str(alive)


def _hang(path: Path) -> str:
    model = load_shard(path, dtype="float64", device="cpu")
    if model.ranks.rank == 1:
        model.ranks.from_first(str)  # while rank 0 sums
    else:
        model.ranks.add_up(torch.zeros(3))
    return "never"


@pytest.mark.slow
def test_a_rank_that_falls_silent_ends_the_others_in_time(folder: Path) -> None:
    found = on_ranks(2, _hang, folder, environment={"SELFSPEC_RANK_TIMEOUT": "2"})
    assert "did not answer within 2 seconds" in str(found[0])


# What is divided


def test_parts_cover_everything_once() -> None:
    for total in (2, 7, 26, 32000):
        for ranks in (1, 2):
            parts = [Part.of(total, rank, ranks) for rank in range(ranks)]
            assert [n for part in parts for n in range(part.start, part.stop)] == [*range(total)]


def test_query_heads_stay_with_their_keys() -> None:
    config = llama().config
    config.num_attention_heads, config.num_key_value_heads = 12, 2
    for ranks in (1, 2, 4, 6):
        plans = [ShardPlan.of(config, rank, ranks) for rank in range(ranks)]
        heads = [n for plan in plans for n in range(plan.heads.start, plan.heads.stop)]
        assert heads == [*range(12)]
        for plan in plans:
            needed = {head // 6 for head in range(plan.heads.start, plan.heads.stop)}
            assert needed == {*range(plan.kv_heads.start, plan.kv_heads.stop)}
            assert plan.heads.size % plan.kv_heads.size == 0
    with pytest.raises(ValueError, match=r"12 heads on 2 key-value heads .* 3 processes: take 1, 2, 4, 6, 8, 10, 12"):
        ShardPlan.of(config, 0, 3)


def test_what_is_wrong_with_a_launch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not divides(None)
    assert not divides("auto")
    with pytest.raises(ValueError, match=r"tensor_parallel is 2, but 1 process was launched.*--nproc-per-node 2"):
        divides(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert divides("auto")
    assert divides(2)


def test_one_process_by_itself_is_a_group_of_one(folder: Path) -> None:
    (found,) = results_of(1, _alone, folder)
    whole = SelfSpecGenerator(load_model(folder, dtype="float64"), policy="ls:1-3")
    assert found == whole.generate([5, 1], max_new_tokens=8).new_tokens


def _alone(path: Path) -> list[int]:
    model = load_shard(path, dtype="float64", device="cpu")
    assert model.ranks is not None
    return SelfSpecGenerator(model, policy="ls:1-3").generate([5, 1], max_new_tokens=8).new_tokens


@pytest.mark.slow
def test_the_command_line_speaks_with_one_voice(folder: Path) -> None:
    """Under torchrun: one text, one summary, one line for an error."""
    wanted = SelfSpecGenerator(load_model(folder, dtype="float64"), tiny_tokenizer()).generate("cab", max_new_tokens=9)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "selfspec", "generate"]
        options = [
            "--model",
            str(folder),
            "--dtype",
            "float64",
            "--device",
            "cpu",
            "--max-new-tokens",
            "9",
            "--policy",
            "ls:2-3",
        ]
        return subprocess.run([*command, *arguments, *options], capture_output=True, text=True, timeout=90, input="cab")

    sound = run("-")
    assert sound.returncode == 0, sound.stderr
    assert sound.stdout.strip("\n") == (wanted.text or "").strip("\n")
    assert sound.stderr.count("stop reason") == 1
    wrong = run("a", "--exit-layer", "1")
    assert wrong.returncode != 0
    assert wrong.stderr.count("error: give policy, or exit_layer") == 1
