"""Two stages at once in two processes: the model's own text, greedy and by law, however far drafts lie ahead."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from staged_models import ADAPTED, LAYERS, save_staged, staged_llama
from strategies import GreedyCase, greedy_cases
from test_distribution import FALSE_ALARMS, PROMPT, VOCAB_SIZE, exact_law, p_value
from test_lossless import options_of
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from layerskip_models import load_model
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel.shard_loading import load_layers
from layerskip_models.prefill import prefill
from selfspec import SelfSpecGenerator
from selfspec.parallel import lead_choice
from selfspec.parallel.overlap_timing import LONGEST
from selfspec.parallel.two_stages import TwoStages
from selfspec.parallel.verifying_stage import Judgement, VerifyingStage

NEW = 24
CPUS = ("cpu", "cpu")
EXAMPLES = 60
PROMPTS = ([5, 1, 7], [9, 9, 3, 0, 23], [2])
LEADS = ((1, 1), (2, 3), (4, 12), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_staged(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def stages(folder: Path) -> Iterator[TwoStages]:
    with TwoStages(folder, 2, dtype="float64", devices=CPUS, start="fork") as found:
        yield found


@pytest.fixture(scope="module")
def llama64() -> LlamaForCausalLM:
    return staged_llama()


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


@dataclass(frozen=True)
class Way:
    """How a text is decoded."""

    exit_layer: int
    lead: tuple[int, int] | None
    overlap: bool


ways = st.builds(
    Way,
    exit_layer=st.integers(1, LAYERS - 1),
    lead=st.one_of(st.none(), st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST))),
    overlap=st.booleans(),
)


@pytest.fixture(scope="module")
def at_every_exit(folder: Path) -> Iterator[dict[int, TwoStages]]:
    with ExitStack() as stack:
        yield {
            layer: stack.enter_context(TwoStages(folder, layer, dtype="float64", devices=CPUS, start="fork"))
            for layer in range(1, LAYERS)
        }


def test_any_text_any_way(at_every_exit: dict[int, TwoStages], llama64: LlamaForCausalLM) -> None:
    """Prompts, processors and stops as drawn, at exits with adapters and bare ones."""
    count: Counter[str] = Counter()

    @given(case=greedy_cases, way=ways)
    @settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])
    def check(case: GreedyCase, way: Way) -> None:
        options = options_of(case, llama64)
        stages = at_every_exit[way.exit_layer]
        stages.leads.fixed, stages.leads.overlap = way.lead, way.overlap
        config = GenerationConfig(do_sample=False, **options)
        result = stages.generate(case.prompt, generation_config=config)
        assert result.new_tokens == reference_greedy(llama64, case.prompt, **options), (case, way)
        stats = result.stats
        count.update([result.stop_reason, "adapted" if stages.plan.adapters else "bare"])
        count["accepted"] += stats.accepted
        count["rejected"] += stats.verified - stats.accepted
        count["thrown away"] += stats.thrown_away

    check()
    print(dict(count))
    kinds = (
        "eos",
        "stop_string",
        "length",
        "adapted",
        "bare",
        "accepted",
        "rejected",
    )  # what is thrown away is a matter of timing
    assert min(count[kind] for kind in kinds) >= EXAMPLES // 15


def test_a_seed_draws_one_text_however_it_is_timed(at_every_exit: dict[int, TwoStages]) -> None:
    stages = at_every_exit[3]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "top_p": 0.95, "repetition_penalty": 1.1}
    drawn = set()
    for seed in (1, 2):
        texts = set()
        for lead, overlap in [*product(LEADS, (True, False)), ((1, 12), True), ((1, 12), True)]:
            stages.leads.fixed, stages.leads.overlap = lead, overlap
            texts.add(tuple(stages.generate([5, 1], seed=seed, **options).new_tokens))
        assert len(texts) == 1
        drawn |= texts
    assert len(drawn) == 2


class Shown:
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False
        self.modes: set[bool] = set()

    def put(self, value: Tensor) -> None:
        self.parts.append(value.tolist())
        self.modes.add(torch.is_inference_mode_enabled())

    def end(self) -> None:
        self.ended = True


class StopAtLength(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] == 10


def test_a_streamer_and_a_stopping_criterion(stages: TwoStages, llama64: LlamaForCausalLM) -> None:
    stages.leads.fixed, stages.leads.overlap = (2, 4), True
    shown = Shown()
    expected = reference_greedy(llama64, PROMPTS[0], max_new_tokens=NEW)
    criteria = StoppingCriteriaList([StopAtLength()])
    result = stages.generate(PROMPTS[0], max_new_tokens=NEW, streamer=shown, stopping_criteria=criteria)
    assert result.new_tokens == expected[:7]
    assert result.stop_reason == "stopping_criteria"
    assert shown.parts[0] == PROMPTS[0]
    assert [token for part in shown.parts[1:] for token in part] == expected[:7]
    assert len(shown.parts) == 2 + result.stats.verifications
    assert shown.ended
    assert shown.modes == {False}
    assert result.stats.num_new_tokens == 7
    assert result.stats.num_prompt_tokens == 3


def test_another_default_device_and_autocast(folder: Path, llama64: LlamaForCausalLM) -> None:
    """Whatever the caller's default is, tensors are made where the stages are; the drafter is forked in that state, too."""
    sampling: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "seed": 4, "suppress_tokens": [3]}
    config = GenerationConfig(**{name: value for name, value in sampling.items() if name != "seed"})
    expected = reference_greedy(llama64, PROMPTS[1], max_new_tokens=NEW, suppress_tokens=[3], min_new_tokens=2)
    texts = []
    for state in (torch.device("cpu"), torch.device("meta"), torch.autocast("cpu", torch.bfloat16)):
        with state, TwoStages(folder, 3, dtype="float64", devices=CPUS, start="fork") as stages:
            greedy = GenerationConfig(max_new_tokens=NEW, suppress_tokens=[3], min_new_tokens=2)
            assert stages.generate(PROMPTS[1], generation_config=greedy).new_tokens == expected
            texts.append(stages.generate(PROMPTS[1], generation_config=config, seed=4).new_tokens)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("exit_layer", [2, 3])
def test_what_the_exit_says_is_drafted(exit_layer: int, at_every_exit: dict[int, TwoStages], folder: Path) -> None:
    """One draft at a time: as many are accepted as the whole model's exit, its adapter included, agrees with it."""
    stages = at_every_exit[exit_layer]
    stages.leads.fixed, stages.leads.overlap = (1, 1), False
    assert (stages.plan.adapters is not None) == (exit_layer in ADAPTED)
    result = stages.generate(PROMPTS[1], max_new_tokens=NEW)
    model = load_model(folder, dtype="float64", device="cpu")
    text = torch.tensor([*PROMPTS[1], *result.new_tokens])
    states: list[Tensor] = []
    with torch.inference_mode():
        prefill(
            model, text, KVCache(model, 64),
            capture=lambda first, done, rows: states.append(rows.clone()) if done == exit_layer else None,
        )  # fmt: skip
        said = model.draft_logits(model.at_exit(states[0], exit_layer)).argmax(dim=-1).tolist()
        bare = model.draft_logits(states[0]).argmax(dim=-1).tolist()
    first = len(PROMPTS[1])
    agreed = sum(said[at] == int(text[at + 1]) for at in range(first, len(text) - 1))
    assert (result.stats.accepted, result.stats.verified) == (agreed, NEW - 1)
    assert (said == bare) == (exit_layer not in ADAPTED)


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


def test_layers_that_there_are_not(folder: Path) -> None:
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
