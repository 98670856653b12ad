"""Drafts that choose among some tokens: what they find is what the whole draft head says of these, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerskip_models.draft_vocabulary as draft_vocabulary
from layerskip_models import LayerSkipModel
from layerskip_models.choices import choices_of
from layerskip_models.draft_vocabulary import (
    DraftTokens,
    TextVocabulary,
    draft_logits,
    draft_outputs,
    draft_vocabulary_of,
)
from matrix_models import DRAFT_HEAD, NONE, VARIANTS, WEIGHTS, exists, kernels_of, model_of
from selfspec import SelfSpecGenerator
from selfspec.engine.expected_cost import expected_cost
from tiny_llama import VOCAB_SIZE

IDS = (9, 2, 7, 17, 3)
KINDS = [(weights, variant) for weights in WEIGHTS for variant in VARIANTS if exists("llama", weights, variant)]


def two_texts(model: LayerSkipModel, ids: tuple[int, ...] = IDS) -> tuple[list[TextVocabulary], Tensor]:
    """Two texts of one vocabulary, with tokens of their own, and a hidden state of each."""
    common = DraftTokens(ids)
    texts = [TextVocabulary(common, own) for own in ((0,), ())]
    texts[0].read([5, 9, 11, 5], written=False)
    texts[1].read([23, 2, 6], written=False)
    hidden = torch.randn(2, model.hidden_size, generator=torch.Generator().manual_seed(1), dtype=model.dtype)
    return texts, 4 * hidden


def check(model: LayerSkipModel, ids: tuple[int, ...] = IDS, meant: tuple[int, ...] = IDS) -> None:
    """Tokens, logits and what is said of them are those of the whole head's logits, with all other tokens masked."""
    texts, hidden = two_texts(model, ids)
    whole = model.draft_logits(hidden)
    model = model.with_draft_vocabulary(texts[0].common)
    masked = torch.full_like(whole, -math.inf)
    for row, own in enumerate([(*meant, 0, 5, 9, 11), (*meant, 23, 2, 6)]):
        masked[row, list(own)] = whole[row, list(own)]
    logits = draft_logits(model, hidden, texts)
    exact = model.kernels is not None
    torch.testing.assert_close(logits, masked, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)
    for detail in ("token", "confidence", "all"):
        for found, wanted in zip(
            draft_outputs(model, hidden, texts, detail), choices_of(masked, "all").outputs(), strict=True
        ):
            numbers = {"token": 2, "confidence": 3, "all": 5}[detail]
            assert found[:numbers] == pytest.approx(wanted[:numbers], rel=1e-4, abs=1e-5)
    # Alone, each text gets the same bits.
    together = draft_outputs(model, hidden, texts, "all")
    alone = [draft_outputs(model, hidden[row : row + 1], texts[row : row + 1], "all")[0] for row in range(2)]
    assert not exact or together == alone


@pytest.mark.parametrize(("weights", "variant"), KINDS)
def test_drafts_choose_among_their_tokens(weights: str, variant: str) -> None:
    with kernels_of(variant):
        check(model_of("llama", weights, variant))
        check(model_of("llama", weights, variant), tuple(range(5)), tuple(range(5)))


@pytest.mark.parametrize("variant", VARIANTS[:1])
def test_the_check_sees_an_id_off_by_one(variant: str) -> None:
    with kernels_of(variant), pytest.raises(AssertionError):
        check(model_of("llama", DRAFT_HEAD, variant), (10, 2, 7, 17, 3))


def test_a_text_of_other_tokens_drafts_from_the_whole_head() -> None:
    text = TextVocabulary(DraftTokens(range(4)), (99, 2))
    text.read(range(50, 90), written=False)  # a prompt says nothing
    assert text.pays and text.own.ids == [99, *range(50, 90)]
    text.read([1] * 36 + [90, 91, 92], written=True)
    assert text.pays  # too few tokens
    text.read([1], written=True)  # 3 of 40
    assert not text.pays
    text.read([1] * 20, written=True)  # 3 of 60
    assert text.pays


def test_choices_of_a_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels_of(NONE):
        model = model_of("llama", "float32", NONE)
        path = tmp_path / "ids.txt"
        path.write_text("7\n3\n7\n")
        ids = {
            choice: getattr(draft_vocabulary_of(model, choice), "ids", None)
            for choice in (4, "4", path, "none", "auto")
        }
        assert ids == {4: [0, 1, 2, 3], "4": [0, 1, 2, 3], path: [7, 3], "none": None, "auto": None}
        path.write_text("seven")
        for wrong in (0, VOCAB_SIZE + 1, 10**12, "9" * 5000, "all", path):
            with pytest.raises(ValueError, match="draft_vocabulary must be a number of tokens"):
                SelfSpecGenerator(model, draft_vocabulary=wrong)
        monkeypatch.setattr(draft_vocabulary, "LARGE", VOCAB_SIZE)
        assert SelfSpecGenerator(model).model.draft_vocabulary is None  # its head is small
        monkeypatch.setattr(draft_vocabulary, "_LEAST_SAVED", 0.0)
        found = SelfSpecGenerator(model).model.draft_vocabulary
        assert found is not None and found.ids == [*range(12)]
        few = model.with_draft_vocabulary(DraftTokens(IDS))
        assert SelfSpecGenerator(few).model is few
        assert SelfSpecGenerator(few, draft_vocabulary="none").model.draft_vocabulary is None


def test_what_drafts_cost_and_what_a_refresh_drops() -> None:
    """The model's costs are those of the rows that drafts read, in the draft head as it is now."""
    with kernels_of(NONE):
        model = model_of("llama", "float32", NONE)
        few = model.with_draft_vocabulary(DraftTokens(IDS))
        assert few.draft_head_bytes < model.draft_head_bytes
        assert expected_cost(few).drafting(1, 1) < expected_cost(model).drafting(1, 1)
        generator = SelfSpecGenerator(few, prefix_cache=0)
        options: dict[str, Any] = {"max_new_tokens": 9, "policy": "ls:1-3", "eos_token_id": [VOCAB_SIZE, 4]}
        found = generator.generate([3, 1, 4, 1, 5], **options).new_tokens
        assert len(few.draft_vocabulary.heads) == 1
        generator.refresh()
        assert not few.draft_vocabulary.heads
        assert generator.generate([3, 1, 4, 1, 5], **options).new_tokens == found
