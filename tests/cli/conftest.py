"""A checkpoint that writes varied text and has drafts of every fate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_llama import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_llama(seed=4, late_scale=0.9, max_position_embeddings=128).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
