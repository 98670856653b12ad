"""What an exit would draft from every position of a text, far past its first mistake.

With that any rule that stops a draft by its confidence or entropy can be played over the text without the model, and so can
drafts that are made while others are judged: as long as all is accepted, a draft goes on as one does that starts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from selfspec import SelfSpecGenerator
from selfspec.pacer.drafts import drafts_at, num_matching


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeDraft:
    """Drafted tokens from one position on, with the confidence and the entropy (nats) of the row that produced each."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    entropies: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedText:
    """The model's own greedy continuation of a prompt, and what one exit drafts along it.

    tokens: the new tokens, N of them. drafts: N - 1 of them; drafts[i] starts when i + 1 new tokens are committed. It has up
    to `window` tokens and ends with the text.
    """

    prompt: str
    task: str
    num_prompt_tokens: int
    exit_layer: int
    num_layers: int
    window: int
    tokens: tuple[int, ...]
    drafts: tuple[FreeDraft, ...]

    def draft(self, committed: int) -> FreeDraft:
        """The draft that starts when so many new tokens are committed, 1 to N - 1."""
        return self.drafts[committed - 1]

    def accepted(self, committed: int, drafted: Sequence[int]) -> int:
        """How many of these tokens, drafted behind the committed ones, are the text's, up to the first that is not."""
        return num_matching(drafted, self.tokens[committed:])


def draft_along(
    generator: SelfSpecGenerator,
    prompt: Tensor,
    max_new_tokens: int,
    exit_layers: Sequence[int],
    window: int,
    *,
    name: str = "",
    task: str = "",
) -> list[DraftedText]:
    """Continue a prompt, int64 [n], greedily without EOS, and draft from every position at each of the exit layers."""
    model = generator.model
    result = generator.generate(
        prompt, max_new_tokens=max_new_tokens, policy="ar", do_sample=False, repetition_penalty=1.0, eos_token_id=[]
    )
    text = result.sequences[0].to(model.device)
    starts = range(prompt.numel() + 1, text.numel())
    found = []
    with torch.inference_mode():
        cache = KVCache(model, text.numel())
        prefill(model, text, cache, stop=max(exit_layers))
        for layer in exit_layers:
            drafts = []
            for draft, seen in drafts_at(model, cache, text, starts, layer, window=window, behind=window):
                features = torch.stack(seen.features).double()
                drafts.append(
                    FreeDraft(
                        tokens=tuple(draft.tokens),
                        confidences=tuple(features[:, 0].exp().tolist()),
                        entropies=tuple(features[:, 2].tolist()),
                    )
                )
            found.append(
                DraftedText(
                    prompt=name,
                    task=task,
                    num_prompt_tokens=prompt.numel(),
                    exit_layer=layer,
                    num_layers=model.num_layers,
                    window=window,
                    tokens=tuple(result.new_tokens),
                    drafts=tuple(drafts),
                )
            )
    return found
