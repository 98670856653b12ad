"""How far a model in fewer bits is from the full one: by hand, and as `inspect --quality` says it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from layerskip_models import from_transformers
from selfspec.analysis import quality as quality_module
from selfspec.analysis.quality import SAMPLE, quality
from selfspec.cli.main import app
from tiny_llama import full_logits, tiny_llama, tiny_tokenizer


def test_against_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts, in pieces, with transformers' logits of both models."""
    monkeypatch.setattr(quality_module, "_CHUNK", 7)
    one, other = tiny_llama(seed=1), tiny_llama(seed=1)
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight.add_(0.2)
    texts = [torch.tensor([(5 * i + k) % 24 for i in range(n)]) for k, n in ((1, 20), (2, 9))]
    loss = full_loss = divergence = same = 0.0
    for text in texts:
        ours, theirs = (full_logits(model, text.tolist())[:-1].double().log_softmax(-1) for model in (other, one))
        for row, token in enumerate(text[1:].tolist()):
            loss, full_loss = loss - float(ours[row, token]), full_loss - float(theirs[row, token])
            divergence += sum(math.exp(float(theirs[row, t])) * float(theirs[row, t] - ours[row, t]) for t in range(24))
            same += float(ours[row].argmax() == theirs[row].argmax())
    found = quality(from_transformers(other), from_transformers(one), [*texts, torch.tensor([3])])
    assert found.num_tokens == 19 + 8
    assert found.perplexity == pytest.approx(math.exp(loss / 27), rel=1e-4)
    assert found.full_perplexity == pytest.approx(math.exp(full_loss / 27), rel=1e-4)
    assert found.divergence == pytest.approx(divergence / 27, rel=1e-3) and found.divergence > 1e-4
    assert found.agreement == pytest.approx(same / 27)
    with pytest.raises(ValueError, match="a text of at least 2 tokens"):
        quality(from_transformers(one), from_transformers(one), [torch.tensor([3])])


def test_inspect_compares_with_the_full_weights(tmp_path: Path) -> None:
    tiny_llama(hidden_size=64, heads=2, kv_heads=1, head_dim=32, intermediate_size=64).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    sample = tmp_path / "sample.txt"
    sample.write_text("a bed, a fig. a cab be a head", encoding="utf-8")
    run = ["inspect", str(tmp_path), "--text", str(sample), "--max-new-tokens", "8", "--repeats", "1", "--quality"]
    result = CliRunner().invoke(app, [*run, "--dtype", "int4"])
    assert result.exit_code == 0, result.output
    tokens = len(tiny_tokenizer()(sample.read_text())["input_ids"]) - 1
    lines = result.stdout.splitlines()
    assert lines[-2].startswith(f"these weights against the full ones, over {tokens} tokens: perplexity ")
    assert lines[-1] == "a token reads 0.1 MB of weights (full 0.4 MB)"
    nothing = CliRunner().invoke(app, run)
    assert nothing.exit_code == 2 and "--quality compares weights in fewer bits" in nothing.stderr


def test_a_text_is_shipped() -> None:
    assert len(SAMPLE.read_text(encoding="utf-8").split()) > 900
