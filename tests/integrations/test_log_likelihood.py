"""Log-likelihoods of given texts, by one prefill pass over them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

import selfspec.integrations.log_likelihood
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.linear import Layout, default_layout
from selfspec.cli.main import app
from selfspec.integrations.log_likelihood import continuation_scores
from tiny_llama import full_logits, reference_greedy, tiny_llama

LAYOUTS: list[Layout] = sorted({"plain", default_layout(torch.empty(8, 8))})
CONTEXT = [5, 1, 7]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_the_models_own(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several continuations of one context, longer than what is scored at a time, and the greedy one among them."""
    monkeypatch.setattr(selfspec.integrations.log_likelihood, "_ROWS", 2)
    llama = tiny_llama(seed=3)
    own = reference_greedy(llama, CONTEXT, max_new_tokens=5)
    continuations = [[2], [9, 9, 3], own, [*own[:-1], (own[-1] + 1) % 24], own[:1]]
    found = continuation_scores(from_transformers(llama, layout=layout), CONTEXT, continuations)
    for (score, _), continuation in zip(found, continuations):
        logits = full_logits(llama, CONTEXT + continuation)[len(CONTEXT) - 1 : -1]
        rows = logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None])
        assert score == pytest.approx(float(rows.sum()), rel=1e-5)
    assert [greedy for _, greedy in found] == [own[:1] == [2], False, True, False, True]


def test_a_shared_context_is_read_once_and_changes_nothing() -> None:
    read: list[int] = []

    class Watched:
        def __init__(self, model: LayerSkipModel) -> None:
            self.model = model

        def __getattr__(self, name: str) -> object:
            return getattr(self.model, name)

        def embed(self, tokens: torch.Tensor) -> torch.Tensor:
            read.append(tokens.numel())
            return self.model.embed(tokens)

    model = from_transformers(tiny_llama(seed=3))
    continuations = [[2, 4], [9], [3, 3, 3]]
    together = continuation_scores(Watched(model), CONTEXT, continuations)  # type: ignore[arg-type]
    assert read == [4, 1, 3]
    alone = [continuation_scores(model, CONTEXT, [continuation])[0] for continuation in continuations]
    assert together == (alone if model.kernels else pytest.approx(alone))


def test_what_cannot_be_scored() -> None:
    model = from_transformers(tiny_llama(seed=3))
    assert len(continuation_scores(model, [1] * 60, [[1] * 5])) == 1  # the last token is not read
    with pytest.raises(ValueError, match="context of 64"):
        continuation_scores(model, [1] * 60, [[1] * 6])
    for context, continuations in (([], [[1]]), ([1], [[2], []])):
        with pytest.raises(ValueError, match="at least one token"):
            continuation_scores(model, context, continuations)


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_the_command_says_what_is_missing() -> None:
    result = CliRunner().invoke(app, ["lm-eval", "--model", "selfspec", "--tasks", "gsm8k"])
    assert result.exit_code == 2
    assert "pip install 'selfspec[eval]'" in result.stderr
