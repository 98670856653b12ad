"""Two stages at once in two processes: the model's own text, greedy and by law, however far drafts lie ahead."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distribution import FALSE_ALARMS, PROMPT, VOCAB_SIZE, exact_law, p_value
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer
from transformers import LlamaForCausalLM

from layerskip_models import load_model
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel.shard_loading import load_layers
from layerskip_models.prefill import prefill
from selfspec import SelfSpecGenerator
from selfspec.parallel import lead_choice
from selfspec.parallel.two_stages import TwoStages
from selfspec.parallel.verifying_stage import Judgement, VerifyingStage

LAYERS, NEW = 5, 24
CPUS = ("cpu", "cpu")
ADAPTED = [1, 3]
PROMPTS = ([5, 1, 7], [9, 9, 3, 0, 23], [2])
LEADS = ((1, 1), (2, 3), (4, 12), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages")
    tiny_llama(num_layers=LAYERS, late_scale=0.2, dtype=torch.float64, seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def stages(folder: Path) -> Iterator[TwoStages]:
    with TwoStages(folder, 2, dtype="float64", devices=CPUS, start="fork") as found:
        yield found


@pytest.fixture(scope="module")
def llama64() -> LlamaForCausalLM:
    return tiny_llama(num_layers=LAYERS, late_scale=0.2, dtype=torch.float64, seed=3)


def test_greedy_text_is_the_models_own(stages: TwoStages, llama64: LlamaForCausalLM) -> None:
    accepted = rejected = 0
    references: dict[tuple[int, bool], list[int]] = {}
    for (index, prompt), lead, overlap in product(enumerate(PROMPTS[:2]), LEADS, (True, False)):
        stages.leads.fixed, stages.leads.overlap = lead, overlap
        for options in ({}, {"repetition_penalty": 1.3}) if overlap else ({},):
            key = index, bool(options)
            if key not in references:
                references[key] = reference_greedy(llama64, prompt, max_new_tokens=NEW, **options)
            expected = references[key]
            result = stages.generate(prompt, max_new_tokens=NEW, **options)
            assert result.new_tokens == expected, (prompt, lead, overlap)
            assert result.stop_reason == "length"
            if not overlap:
                assert result.stats.thrown_away == 0
            accepted += result.stats.accepted
            rejected += result.stats.verified - result.stats.accepted
    assert min(accepted, rejected) > 50


@pytest.mark.parametrize("overlap", [True, False])
def test_a_lead_that_changes_all_the_time(
    overlap: bool, stages: TwoStages, llama64: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter drafts as far as it was told last, and the verification waits for no more than that."""
    leads = cycle([(1, 1), (6, 12), (2, 1), (8, 1), (1, 12)])
    monkeypatch.setattr(lead_choice, "_RECONSIDERED", 1)
    monkeypatch.setattr(lead_choice, "best_lead_of", lambda *arguments: next(leads))
    stages.leads.fixed, stages.leads.overlap = None, overlap
    for prompt in PROMPTS:
        result = stages.generate(prompt, max_new_tokens=NEW)
        assert result.new_tokens == reference_greedy(llama64, prompt, max_new_tokens=NEW)


def test_stops_inside_a_draft(stages: TwoStages, llama64: LlamaForCausalLM) -> None:
    stages.leads.fixed, stages.leads.overlap = (4, 8), True
    text = reference_greedy(llama64, PROMPTS[1], max_new_tokens=NEW)
    for budget in (1, 2, 3, 7):
        assert stages.generate(PROMPTS[1], max_new_tokens=budget).new_tokens == text[:budget]
    for at in (3, 6):
        expected = reference_greedy(llama64, PROMPTS[1], max_new_tokens=NEW, eos_token_id=[text[at]])
        result = stages.generate(PROMPTS[1], max_new_tokens=NEW, eos_token_id=[text[at]])
        assert result.new_tokens == expected
        assert result.stop_reason == "eos"
    words = tiny_tokenizer().decode(text[5:7])
    stopped = stages.generate(PROMPTS[1], max_new_tokens=NEW, stop_strings=[words])
    assert stopped.new_tokens == reference_greedy(llama64, PROMPTS[1], max_new_tokens=NEW, stop_strings=[words])


@pytest.mark.skipif(not native_works(torch.device("cpu"), torch.float32), reason="no native kernels here")
def test_on_our_kernels_it_is_the_text_of_one_process(folder: Path) -> None:
    generator = SelfSpecGenerator(load_model(folder, dtype="bfloat16", device="cpu"))
    with TwoStages(folder, 3, dtype="bfloat16", start="fork", cores=([0], [0])) as stages:
        assert stages.model.kernels is not None
        assert os.sched_getaffinity(0) == {0}
        for prompt in PROMPTS:
            expected = generator.generate(prompt, max_new_tokens=NEW, policy="ar").new_tokens
            assert stages.generate(prompt, max_new_tokens=NEW).new_tokens == expected


def counted(stages: TwoStages, draws: int) -> Counter[tuple[int, ...]]:
    options = {"do_sample": True, "temperature": 1.3, "top_k": 3, "repetition_penalty": 1.2, "max_new_tokens": 5}
    runs = (stages.generate([*PROMPT], seed=seed, **options).new_tokens[:3] for seed in range(draws))
    return Counter(tuple(run) for run in runs)


@pytest.mark.parametrize("draws", [200, pytest.param(6_000, marks=pytest.mark.slow)])
def test_samples_have_the_models_law(draws: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First 3 of 5 tokens, 3 possible ones each; false-alarm rate 1e-4. It sees a stage that accepts everything."""
    llama = tiny_llama(num_layers=3, vocab_size=VOCAB_SIZE, late_scale=0.4, seed=11)
    llama.save_pretrained(tmp_path)
    law = exact_law(llama, 3, top_k=3)
    with TwoStages(tmp_path, 1, dtype="float32", lead=(1, 3), start="fork") as stages:
        found = p_value(counted(stages, draws), law)
        print(f"p-value of {draws} draws: {found:.3f}")
        assert found > FALSE_ALARMS
        judge = VerifyingStage.judge

        def accept_all(stage: VerifyingStage, text: Any, rows: Any) -> Judgement:
            judge(stage, text, rows)
            return Judgement(rows=len(rows), accepted=len(rows))

        monkeypatch.setattr(VerifyingStage, "judge", accept_all)
        assert p_value(counted(stages, 200), law) < FALSE_ALARMS


def test_a_drafter_that_ends_ends_the_text(folder: Path) -> None:
    with TwoStages(folder, 2, dtype="float64", start="fork") as stages:
        assert stages._link is not None
        assert stages._link.process.pid is not None
        os.kill(stages._link.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the process that drafts has ended"):
            stages.generate([5, 1], max_new_tokens=4)


def test_what_is_wrong_is_said(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"exit_layer must be in \[1, 4\]"):
        TwoStages(folder, LAYERS)
    with pytest.raises(ValueError, match=r"lead must be \(rows, ahead\)"):
        TwoStages(folder, 1, lead=(0, 2))
    with pytest.raises(ValueError, match="not among the 5"):
        load_layers(folder, range(3, 6))


def test_layers_in_two_parts_are_the_model(folder: Path) -> None:
    whole = load_model(folder, dtype="float64", device="cpu")
    parts = [load_layers(folder, layers, dtype="float64", device="cpu") for layers in (range(2), range(2, LAYERS))]
    assert [part.num_layers for part in parts] == [2, 3]
    tokens = torch.tensor(PROMPTS[1])
    with torch.inference_mode():
        hidden = prefill(parts[0], tokens, KVCache(parts[0], 8))
        hidden = parts[1].run_layers(hidden, 0, 3, KVCache(parts[1], 8))
        assert torch.equal(parts[1].logits(hidden), whole.logits(prefill(whole, tokens, KVCache(whole, 8))))
