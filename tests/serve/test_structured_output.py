"""The grammar's mask is a pure function of the text, whatever was asked before."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch

from layerskip_models import DEMO_PATH, load_tokenizer
from selfspec.serve.structured_output import GrammarProcessor, Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(load_tokenizer(DEMO_PATH), 4096, [0])


def test_rolled_back_masks_equal_fresh_ones(vocabulary: Vocabulary) -> None:
    random, prompt = Random(1), [7, 8]
    kept = GrammarProcessor(vocabulary, SCHEMA, len(prompt))
    texts: list[list[int]] = [[]]
    for _ in range(200):
        text = random.choice(texts[-20:])
        text = text[: random.randint(0, len(text))] if random.random() < 0.3 else text
        ids, scores = torch.tensor([prompt + text]), torch.zeros(1, 4096)
        masked = kept(ids, scores)
        fresh = GrammarProcessor(vocabulary, SCHEMA, len(prompt))(ids, scores)
        assert masked.equal(fresh)
        allowed = masked[0].isfinite().nonzero().flatten().tolist()
        following = random.choice(allowed)
        if following != 0:  # the end of the text
            texts.append([*text, following])
        else:
            json.loads(b"".join(map(vocabulary.bytes_of, text)))
    assert max(map(len, texts)) > 8


def test_a_text_outside_the_grammar_is_refused_and_forgotten(vocabulary: Vocabulary) -> None:
    processor = GrammarProcessor(vocabulary, SCHEMA, 0)
    scores = torch.zeros(1, 4096)
    start = processor(torch.empty(1, 0, dtype=torch.long), scores)
    brace = int(start[0].isfinite().nonzero()[0])
    with pytest.raises(ValueError, match="grammar"):
        processor(torch.tensor([[brace, brace, brace, brace]]), scores)
    assert processor(torch.empty(1, 0, dtype=torch.long), scores).equal(start)


def test_schemas_that_cannot_be_used() -> None:
    tokenizer = load_tokenizer(DEMO_PATH)
    with pytest.raises(ValueError, match="cannot be used"):
        Vocabulary(tokenizer, 4096, [0]).matcher({"type": "?"})
    with pytest.raises(ValueError, match="end-of-sequence"):
        Vocabulary(tokenizer, 4096, []).matcher(SCHEMA)
