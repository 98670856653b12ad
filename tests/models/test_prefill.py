"""A prompt is read in passes whose masks stay small, and what they leave does not depend on where they end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding import decode
from layerskip_models import from_transformers
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import piece_end, prefill
from policies import parse_policy
from selfspec.engine.round import read_prompts
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence
from tiny_llama import reference_greedy, request_for, tiny_llama


def pieces(length: int, **options: int) -> list[tuple[int, int]]:
    """(first, end) of each pass that reads a text of so many tokens."""
    found = [(0, piece_end(0, length, **options))]
    while found[-1][1] < length:
        found.append((found[-1][1], piece_end(found[-1][1], length, **options)))
    return found


@pytest.mark.parametrize("length", [1, 1024, 1025, 5000, 40000])
def test_prefill_passes_keep_their_masks_small(length: int) -> None:
    found = pieces(length)
    assert all(first < end <= length for first, end in found)
    assert max(end - first for first, end in found) <= 1024
    masks = [(end - first) * end for first, end in found if first and end - first > 128]
    assert max(masks, default=0) <= 4 << 20
    assert len(found) == -(-length // 1024) or length > 4096


@given(length=st.integers(1, 9000), most=st.integers(1, 1100), together=st.integers(0, 300))
def test_the_last_rows_are_read_together(length: int, most: int, together: int) -> None:
    """As many as shall be; and no pass is longer than it may be but for that."""
    found = pieces(length, most=most, together=together)
    assert all(first < end <= length for first, end in found)
    assert found[-1][0] <= max(length - together, 0)
    assert all(end - first <= most for first, end in found[:-1])
    assert found[-1][1] - found[-1][0] <= max(most, together)


def test_prefill_in_passes_that_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerskip_models.prefill._MASK_ELEMENTS", 50 * 120)
    monkeypatch.setattr("layerskip_models.prefill._FEWEST_ROWS", 10)
    prompt = [i * i % 23 for i in range(301)]
    assert [end - first for first, end in pieces(301, most=50)][:3] == [50, 50, 40]
    llama = tiny_llama(num_layers=3, dtype=torch.float64, max_position_embeddings=400, seed=3)
    model = from_transformers(llama, layout="plain")
    with torch.inference_mode():
        policy = parse_policy("ls:1-3", num_layers=3)
        text = Sequence(model, KVCache(model, 321), request_for(model, prompt, max_new_tokens=20), policy)
        lengths = []
        while text.reading:
            lengths.append(text.length - text.cache.length)
            read_prompts([text], 50)
        assert lengths == [301 - first for first, _ in pieces(301, most=50)]
        for _ in decode(text, EagerRunner(model)):
            pass
    assert text.tokens[0, 301 : text.length].tolist() == reference_greedy(llama, prompt, max_new_tokens=20)
    whole, parts = KVCache(model, 321), KVCache(model, 321)
    ids = torch.tensor(prompt)
    hidden = [prefill(model, ids, cache, most=most)[-1] for cache, most in ((whole, 301), (parts, 50))]
    torch.testing.assert_close(*hidden, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="holds all of this text already"):
        prefill(model, ids, parts)
