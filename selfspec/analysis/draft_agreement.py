"""How often the drafts of a second model would be accepted, predicted from one greedy text of the full model for each prompt.

A greedy draft is accepted as long as it is the full model's own next token, so the draft's argmax at every position of that
text decides the rounds of every draft length (`replay`). That holds for greedy decoding, a fixed number of drafts a round and
no end-of-text token; transformers has these as `num_assistant_tokens`, `num_assistant_tokens_schedule="constant"` and
`assistant_confidence_threshold=0`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.analysis.replay import AgreementTrace, Replay, replay
from selfspec.engine.stats import mean
from selfspec.generator import SelfSpecGenerator


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAgreement:
    """Where a draft model predicts what the full model says.

    traces: of each prompt, with the last token of the prompt as the first of `tokens`, since such a draft model begins at the
    prompt's end. num_draft_layers: of the draft, the key of their `agrees`.
    """

    traces: tuple[AgreementTrace, ...]
    num_draft_layers: int

    @property
    def agreement(self) -> float | None:
        """Share of the new tokens that the draft predicts when it sees everything before them."""
        return mean(trace.agreement(self.num_draft_layers) for trace in self.traces)

    def rounds(self, num_drafts: int) -> Replay:
        """The rounds of all prompts, when `num_drafts` are made a round. The first pass of each reads the prompt as well."""
        found = [replay(trace, self.num_draft_layers, num_drafts) for trace in self.traces]
        return replace(
            found[0],
            drafted=tuple(count for one in found for count in one.drafted),
            accepted=tuple(count for one in found for count in one.accepted),
        )


def own_texts(
    generator: SelfSpecGenerator,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    advance: Callable[[str], None] = lambda label: None,
) -> list[Tensor]:
    """The model's greedy continuation of each prompt, int64 [new], EOS off. advance: called after each."""
    found = []
    for prompt in prompts:
        result = generator.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=[])
        found.append(torch.tensor(result.new_tokens, dtype=torch.long))
        advance("the model's own text")
    return found


def draft_agreement(
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    texts: Sequence[Tensor],
    advance: Callable[[str], None] = lambda label: None,
) -> DraftAgreement:
    """Compare a draft model with the full model's greedy texts: one pass over each.

    prompts: int64 [n] each. texts: the continuations, int64 [new] each. advance: called after each.
    """
    layers = draft.config.num_hidden_layers
    traces = []
    for prompt, text in zip(prompts, texts):
        tokens = torch.cat([prompt, text]).to(draft.device)
        with torch.inference_mode():
            logits = draft(tokens[None, :-1], use_cache=False, logits_to_keep=len(text)).logits[0]
        agrees = (logits.argmax(dim=-1) == tokens[len(prompt) :]).double().tolist()
        traces.append(
            AgreementTrace(
                tokens=(int(prompt[-1]), *text.tolist()), agrees={layers: tuple(agrees)}, num_layers=layers + 1
            )
        )
        advance("the draft's agreement with it")
    return DraftAgreement(traces=tuple(traces), num_draft_layers=layers)
