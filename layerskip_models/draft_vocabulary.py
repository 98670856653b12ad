"""A draft head over the tokens that occur: the most frequent ones of the vocabulary, and those of the text itself.

With a large vocabulary much of a draft's cost is its head, and most tokens are rare. So drafts choose among some thousands of
tokens, whose rows of the draft head are gathered once, and the text's own, whose rows are gathered as they come. No other
token is drafted. Verification knows all of them, so no text changes.
Source: FR-Spec (Zhao et al. 2025), without the text's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from layerskip_models.choices import Detail, HeadOutput
from layerskip_models.decoder_layer import Linear
from layerskip_models.grouped_weight import GroupedLinear
from layerskip_models.kernels.native_linear import NativeLinear
from layerskip_models.linear import PlainLinear
from layerskip_models.model import LayerSkipModel

LARGE = 32_000
"""The smallest vocabulary of which "auto" takes the first half. A BPE numbers its tokens in the order of its merges,
so the first are the most frequent (docs/fewer-bits.md)."""
_LEAST_SAVED = 0.1
"""The share of a draft's bytes that half a head must save, where it reads half of the layers' bytes; else all."""
_ENOUGH, _MOST_MISSED = 40, 0.05
"""After so many tokens of which this share could not be drafted, a text's drafts choose among all."""


def draft_vocabulary_of(model: LayerSkipModel, choice: int | str | Path) -> DraftTokens | None:
    """Find what was asked for: a number, for the first tokens; a file of ids, one a line; "auto"; "none".

    Raises ValueError for a number that is too large, and for a file that cannot be read or holds anything else.
    """
    kept, size, written = model.draft_vocabulary, model.vocab_size, str(choice)
    if written == "none" or (written == "auto" and (kept is not None or not _pays(model))):
        return kept if written == "auto" else None
    if written == "auto":
        return DraftTokens(range(size // 2))
    try:
        read = not written.isdecimal()
        ids = [*map(int, Path(written).read_text().split())] if read else range(min(int(written), size + 1))
    except (OSError, ValueError):
        ids = []
    if not ids or not 0 <= min(ids) <= max(ids) < size:
        raise ValueError(
            f"draft_vocabulary must be a number of tokens from 1 to {size}, a file of their ids, auto or none, "
            f"got {written[:64]!r}"
        )
    return DraftTokens(ids)


def _pays(model: LayerSkipModel) -> bool:
    head = model.draft_head.num_bytes
    saves = head / 2 > _LEAST_SAVED * (head + model.num_layers * model.layer_bytes / 2)
    return saves and model.device.type == "cpu" and model.vocab_size >= LARGE


class DraftTokens:
    """Tokens that drafts may choose, each once, and their rows of heads, found when they are first asked for.

    ids: in the order of the rows. places: the same as an index; of the first tokens a slice, whose rows need no gathering.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids = [*dict.fromkeys(ids)]
        self.known, first = frozenset(self.ids), slice(len(self.ids))
        at_first = self.ids == [*range(first.stop)]
        self.places = first if at_first else torch.tensor(self.ids, dtype=torch.long, device="cpu")
        self.heads: dict[Linear, Linear] = {}

    def head(self, whole: Linear) -> Linear:
        """Return the rows of a head."""
        found = self.heads.get(whole)
        if found is None:
            assert isinstance(whole, (NativeLinear, PlainLinear, GroupedLinear))
            found = self.heads[whole] = whole.taking(self.places)
        return found


class TextVocabulary:
    """Hold what one text's drafts may choose.

    common: tokens that any text's may. own: others, which the text holds, in the order in which they came, after those that
    end it. num_read: tokens of the text that it has taken.
    """

    def __init__(self, common: DraftTokens, own: Iterable[int] = ()) -> None:
        self.common, self.own = common, DraftTokens(sorted({*own} - common.known))
        self.num_read = self._missed = self._written = 0

    @property
    def pays(self) -> bool:
        """Tell whether enough of what the model wrote could be drafted. It depends on the text alone."""
        return self._written < _ENOUGH or self._missed <= _MOST_MISSED * self._written

    def read(self, tokens: Sequence[int], *, written: bool) -> None:
        """Take the text's next tokens. written: whether the model wrote them; else they are of the prompt."""
        own, common, count = self.own, self.common.known, self._written + written * len(tokens)
        new = [token for token in dict.fromkeys(tokens) if token not in common and token not in own.known]
        own, missed = DraftTokens([*own.ids, *new]) if new else own, self._missed + written * len(new)
        num_read = self.num_read + len(tokens)
        # Nothing is called here, so no signal comes between.
        self.own, self._missed, self._written, self.num_read = own, missed, count, num_read


def draft_outputs(
    model: LayerSkipModel, hidden: Tensor, texts: Sequence[TextVocabulary], detail: Detail
) -> list[HeadOutput]:
    """Choose each row's best token among those of its text. hidden: [rows, hidden], of `at_exit`.

    texts: of each row; empty where all tokens may be drafted. Probabilities and the like are within these tokens.
    """
    if not texts:
        return model.draft_choices(hidden, detail).outputs()
    found = model.choices_by(model.drafting_head, hidden, detail).outputs()
    return with_own_tokens(model, found, hidden, texts, detail)


def with_own_tokens(
    model: LayerSkipModel, found: Sequence[HeadOutput], hidden: Tensor, texts: Sequence[TextVocabulary], detail: Detail
) -> list[HeadOutput]:
    """Do the same from what the model's `drafting_head` has found."""
    outputs = []
    for index, (output, text) in enumerate(zip(found, texts)):
        output = output._replace(token=text.common.ids[output.token])
        if text.own.ids:
            head = text.own.head(model.draft_head)
            (other,) = model.choices_by(head, hidden[index : index + 1], detail).outputs()
            output = _joined(output, other._replace(token=text.own.ids[other.token]))
        outputs.append(output)
    return outputs


def draft_logits(model: LayerSkipModel, hidden: Tensor, texts: Sequence[TextVocabulary]) -> Tensor:
    """Logits of each row's tokens, float32 [rows, vocab]; -infinity for others, which are never drawn. As `draft_outputs`."""
    if not texts:
        return model.draft_logits(hidden)
    common = model.logits_by(model.drafting_head, hidden)
    logits = common.new_full((len(texts), model.vocab_size), -math.inf)
    logits[:, texts[0].common.places] = common
    for index, text in enumerate(texts):
        if text.own.ids:
            logits[index, text.own.places] = model.logits_by(
                text.own.head(model.draft_head), hidden[index : index + 1]
            )[0]
    return logits


def _joined(one: HeadOutput, other: HeadOutput) -> HeadOutput:
    """Look at the tokens of two heads together. NaN where either has NaN."""
    if other.logit > one.logit or other.logit != other.logit:
        one, other = other, one
    if one.confidence != one.confidence or other.logit == -math.inf:
        return one
    below = one.logit - other.logit
    ratio = math.exp(-below) * one.confidence / other.confidence  # of the sums that probabilities are shares of
    share = 1 / (1 + ratio)  # of the first head's tokens
    entropy = share * (one.entropy - math.log(share))
    if ratio > 0:
        entropy += (1 - share) * (other.entropy - math.log(ratio * share))
    return HeadOutput(one.token, one.logit, one.confidence * share, min(one.margin, below), entropy)
