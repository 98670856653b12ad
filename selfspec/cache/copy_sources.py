"""What a caller may copy from in addition to the text itself: texts, token ids, or a store made once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from policies import ObservationSpec, Policy
from selfspec.cache.copy_index import CopyStore
from selfspec.engine.runners.choice import RunnerName

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CopyFrom = CopyStore | Sequence[str | list[int] | Tensor]


def make_store(
    texts: Iterable[str | list[int] | Tensor], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> CopyStore:
    """A store of these texts, as text (which needs a tokenizer) or as token ids.

    Raises TypeError for a single text instead of a list and for anything else; ValueError where a tokenizer is missing, for
    an id that the model does not have, and where there is nothing to copy.
    """
    if isinstance(texts, (str, Tensor)):
        raise TypeError("copy_from takes a list of texts: put this one into a list")
    encoded = [_ids(text, tokenizer) for text in texts]
    if not any(len(ids) > 1 for ids in encoded):
        raise ValueError("copy_from holds no text of two tokens or more: leave it out")
    wrong = [token for ids in encoded for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"copy_from holds the token id {wrong[0]}; this model's are 0 to {vocab_size - 1}")
    return CopyStore(encoded)


def _ids(text: object, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("texts to copy from need a tokenizer: pass one to SelfSpecGenerator, or give token ids")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert isinstance(ids, list)
        return ids
    if isinstance(text, Tensor):
        text = text.flatten().tolist()
    if not isinstance(text, list) or not all(type(token) is int for token in text):
        raise TypeError(f"copy_from takes texts or lists of token ids, got {type(text).__name__}")
    return text


def copies_drafts(observes: ObservationSpec, runner: RunnerName) -> bool:
    """Whether anything is copied for a policy that needs this, by a generator with this runner.

    Captured rounds do not copy, so a policy that only may copy does not copy there.
    """
    return observes.copies == "needed" or (observes.copies == "welcome" and runner == "eager")


def how_to_copy(policy: Policy) -> str:
    """The remedy for a policy that does not copy here."""
    if policy.observes.copies == "none":
        return "use auto, or copy"
    return 'captured rounds do not copy, so use runner="eager", or a policy that begins with copy'


def store_for(
    copy_from: CopyFrom | None,
    policy: Policy,
    runner: RunnerName,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> CopyStore | None:
    """The store of one call, None for none.

    Raises ValueError for a policy that copies nothing, and for a store of another model's tokens; as `make_store` otherwise.
    """
    if copy_from is None:
        return None
    if not copies_drafts(policy.observes, runner):
        raise ValueError(f"copy_from changes nothing with policy {policy.name!r}: {how_to_copy(policy)}")
    if not isinstance(copy_from, CopyStore):
        return make_store(copy_from, tokenizer, vocab_size)
    if copy_from.largest_token >= vocab_size:
        raise ValueError(
            f"the store holds the token id {copy_from.largest_token}; this model's are 0 to {vocab_size - 1}"
        )
    return copy_from
