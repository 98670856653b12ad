"""lm-evaluation-harness, the real package, on a tiny local task: same texts and score whatever the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import tiny_llama, tiny_tokenizer

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator

lm_eval = pytest.importorskip("lm_eval")

QUESTIONS = ["a bed", "a fig, a", "head cab", "be fig bed"]


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    return SelfSpecGenerator(from_transformers(tiny_llama(seed=3)), tiny_tokenizer())


@pytest.fixture
def task(tmp_path: Path, generator: SelfSpecGenerator) -> dict[str, Any]:
    """Exact match with what the model itself says up to its first "b", for all questions but the last."""
    rows = []
    for number, question in enumerate(QUESTIONS):
        text = generator.generate(question, max_new_tokens=12, policy="ar").text or ""
        rows.append({"question": question, "answer": "no" if number == 3 else text.split("b")[0]})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "task": "tiny", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["b"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["ar", "ls:1-4", "auto:cost=layers"])
def test_a_task_runs_through_the_engine(policy: str, generator: SelfSpecGenerator, task: dict[str, Any]) -> None:
    from bench.engines.lm_eval_adapter import SelfSpecLM

    model = SelfSpecLM(generator, policy=policy)
    results = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
    assert results["results"]["tiny"]["exact_match,none"] == 0.75
    assert len(model.stats) == len(QUESTIONS)
    assert model.speed > 0
    if policy == "ls:1-4":
        assert sum(stats.num_drafted for stats in model.stats) > 0


def test_what_it_does_not_do(generator: SelfSpecGenerator) -> None:
    from lm_eval.api.instance import Instance

    from bench.engines.lm_eval_adapter import SelfSpecLM

    model = SelfSpecLM(generator, max_gen_toks=4)
    with pytest.raises(NotImplementedError, match="log-likelihoods"):
        model.loglikelihood([])

    def ask(**options: Any) -> list[str]:
        return model.generate_until([Instance("generate_until", {}, ("a bed", options), 0)], disable_tqdm=True)

    with pytest.raises(ValueError, match="num_beams"):
        ask(num_beams=2)
    assert ask() == [generator.generate("a bed", max_new_tokens=4).text]
    assert ask(do_sample=True, temperature=0, until="") == ask()
    assert len(generator.tokenizer("a bed " * 60)["input_ids"]) > 64  # type: ignore[misc]
    long = model.generate_until([Instance("generate_until", {}, ("a bed " * 60, {}), 0)], disable_tqdm=True)
    assert long[0]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        SelfSpecLM(SelfSpecGenerator(generator.model))
