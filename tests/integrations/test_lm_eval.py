"""lm-evaluation-harness, the real package, on tiny local tasks: same texts and scores whatever the policy."""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from layerskip_models import from_transformers
from selfspec import SelfSpecGenerator
from selfspec.cli.main import app
from tiny_llama import tiny_llama, tiny_tokenizer

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
    from selfspec.integrations.lm_eval_model import SelfSpecLM

    model = SelfSpecLM(generator, policy=policy)
    results = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
    assert results["results"]["tiny"]["exact_match,none"] == 0.75
    assert len(model.stats) == len(QUESTIONS)
    assert model.speed > 0
    if policy == "ls:1-4":
        assert sum(stats.num_drafted for stats in model.stats) > 0


@pytest.mark.parametrize("output_type", ["multiple_choice", "loglikelihood_rolling"])
def test_log_likelihoods_are_the_harness_own(output_type: str, checkpoint: Path, tmp_path: Path) -> None:
    """The same task with the harness's own transformers model: metrics agree to float32 rounding."""
    import selfspec.integrations.lm_eval_model  # noqa: F401, registers the model where plug-ins are not looked for

    folder = shutil.copytree(checkpoint, tmp_path / "with-eos")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "."
    tokenizer.save_pretrained(folder)
    data = tmp_path / "rows.jsonl"
    rows = [{"question": q, "choices": [" a", " be bed", "fig"], "gold": n % 3} for n, q in enumerate(QUESTIONS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task: dict[str, Any] = {
        "task": "scored", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "output_type": output_type, "doc_to_text": "{{question}}",
    }  # fmt: skip
    if output_type == "multiple_choice":
        task |= {"doc_to_target": "gold", "doc_to_choice": "choices"}
    else:
        task |= {
            "doc_to_text": "", "doc_to_target": "{{question}} be a fig head" * 8,
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
        }  # fmt: skip
    found = {}
    for name, extra in {"hf": {"dtype": "float32"}, "selfspec": {"policy": "ls:1-4"}}.items():
        arguments = {"pretrained": str(folder), **extra}
        results = lm_eval.simple_evaluate(
            model=name, model_args=arguments, tasks=[task], bootstrap_iters=0, device="cpu", log_samples=True
        )
        metrics = results["results"]["scored"]
        found[name] = {key: value for key, value in metrics.items() if isinstance(value, float)}
        found[name] |= {
            f"{number}, {choice}": float(answer[0][0] if isinstance(answer[0], (list, tuple)) else answer[0])
            for number, sample in enumerate(sorted(results["samples"]["scored"], key=lambda sample: sample["doc_id"]))
            for choice, answer in enumerate(sample["resps"])
        }
    assert found["selfspec"] == pytest.approx(found["hf"], rel=1e-4)
    assert len(found["hf"]) > 4


def test_the_harness_finds_it_by_its_entry_point() -> None:
    from lm_eval.api.registry import get_model

    from selfspec.integrations.lm_eval_model import SelfSpecLM

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'\[project.entry-points."lm_eval.models"\]\nselfspec = "(.*)"', project)
    assert declared is not None
    assert EntryPoint("selfspec", declared[1], "lm_eval.models").load() is SelfSpecLM
    assert get_model("selfspec") is SelfSpecLM


def test_the_command_runs_a_task(checkpoint: Path, task: dict[str, Any], tmp_path: Path) -> None:
    """`selfspec lm-eval` is the harness's own command, with the model registered."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(json.dumps(task), encoding="utf-8")  # YAML takes JSON
    arguments = ["--model", "selfspec", "--model_args", f"pretrained={checkpoint},policy=ls:1-4", "--tasks", "tiny"]
    arguments += [
        "--include_path",
        str(tmp_path / "tasks"),
        "--batch_size",
        "2",
        "--output_path",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, ["lm-eval", *arguments])
    assert result.exit_code == 0, result.output
    (written,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(written.read_text(encoding="utf-8"))
    assert found["results"]["tiny"]["exact_match,none"] == 0.75


def test_what_it_does_not_do(generator: SelfSpecGenerator) -> None:
    from lm_eval.api.instance import Instance

    from selfspec.integrations.lm_eval_model import SelfSpecLM

    model = SelfSpecLM(generator, max_gen_toks=4)
    with pytest.raises(ValueError, match="lss"):
        SelfSpecLM(generator, policy="lss")

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
