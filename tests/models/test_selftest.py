"""`selfspec verify` passes where the engine is right, and fails clearly on every planted fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import selfspec.engine.verification
from layerskip_models import LayerSkipModel
from layerskip_models.kernels.check import native_works
from policies import LayerCost, parse_policy
from policies.names import EXITS, STOPPINGS
from selfspec.analysis.exactness import Check, every_policy, num_steps, verify_engine
from selfspec.cli.main import app
from selfspec.engine.accept import accept_sampled
from tiny_llama import tiny_llama

DRAWS = 20
"""So few show that sampling runs and stays within the top-k. The law itself is in tests/law."""
PROMPTS = [torch.tensor([5, 3, 7, 1]), torch.tensor([2, 9])]
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 3": {"heads": 4, "kv_heads": 2, "rope": "llama3"},
    "two layers": {"num_layers": 2},
}
"""Of two layers the exits are others."""


def checks(llama: LlamaForCausalLM, **options: Any) -> list[Check]:
    settings: dict[str, Any] = {"max_new_tokens": 12, "draws": DRAWS, **options}
    return list(verify_engine(llama, PROMPTS, **settings))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_policy_passes_for_it(shape: str) -> None:
    told: list[str] = []
    llama = tiny_llama(seed=3, **SHAPES[shape])
    num_layers = llama.config.num_hidden_layers
    found = checks(llama, on_progress=told.append)
    assert [check.name for check in found if not check.passed] == []
    assert len(told) == num_steps(num_layers, len(PROMPTS), DRAWS)
    names = {check.name.removeprefix("greedy, ") for check in found if check.name.startswith("greedy")}
    left_out = {name for name in every_policy(num_layers) if name.startswith("bits:")}
    assert names | left_out == set(every_policy(num_layers))
    assert bool(names & left_out) == native_works(torch.device("cpu"), torch.float32)


def test_all_policies_are_there() -> None:
    names = every_policy(8)
    used = {part.split(":")[0] for name in names for part in name.split("+")}
    # Pacer needs a trained layer beside the model, and a wave a looped model, which transformers cannot judge.
    assert used | {"pacer", "wave"} == EXITS.keys() | STOPPINGS.keys()
    for name in every_policy(2):
        parse_policy(name, num_layers=2, measure=lambda: LayerCost(2))


def accepts_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is accepted with a probability that is a hundredth too large."""

    def biased(p: Tensor, q: Tensor, reached: Sequence[float], uniforms: Sequence[float]) -> Any:
        return accept_sampled(p, q, reached, [uniform / 1.01 for uniform in uniforms])

    monkeypatch.setattr(selfspec.engine.verification, "accept_sampled", biased)


def accepts_any_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft counts as right."""
    monkeypatch.setattr(selfspec.engine.verification, "accept_greedy", lambda drafts, target: len(drafts))


def wrong_single_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is wrong for one row only, as some devices' kernels were."""
    original = LayerSkipModel.logits

    def faulty(self: LayerSkipModel, hidden: Tensor) -> Tensor:
        logits = original(self, hidden)
        return logits.flip(-1) if len(hidden) == 1 else logits

    monkeypatch.setattr(LayerSkipModel, "logits", faulty)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (accepts_any_greedy, "greedy, ls:1-4"),
        (accepts_too_much, "acceptance rule"),
        (wrong_single_row, "head on a single row"),
    ],
)
def test_planted_faults_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = checks(tiny_llama(seed=3, late_scale=0.6), draws=0, policies=["ar", "ls:1-4"])
    assert expected in [check.name for check in found if not check.passed]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


def test_the_command(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a bed, a fig", encoding="utf-8")
    arguments = (str(checkpoint), "--file", str(prompt), "--policy", "ls:1-4", "--draws", "20", "--max-new-tokens", "8")
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count("ok ") == 7
    assert "ok      kernels: " in result.output
    assert result.output.rstrip().endswith("gives what the model itself gives")
    accepts_any_greedy(monkeypatch)
    result = command(*arguments)
    assert result.exit_code == 1
    assert "FAILED  greedy, ls:1-4: differs at new token" in result.output
    assert "NOT verified: 1 of the checks failed" in result.output
