"""From logits to distributions and tokens: transformers' processors, float32 softmax, draws from a torch.Generator.

Where our kernels run the model, they also do the last part: temperature, top-k, top-p, softmax and the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerskip_models.kernels.native_sampling import (
    Accepted,
    Warp,
    accept_drafts,
    distribute,
    draw,
    sample,
    takes,
)
from selfspec.engine.accept import acceptance_probabilities

if TYPE_CHECKING:
    from transformers import LogitsProcessor, LogitsProcessorList


@cache
def prefix_free() -> frozenset[type]:
    """Processors whose result does not depend on the text so far, so that all rows can be processed in one call."""
    from transformers.generation import logits_process as theirs

    return frozenset(
        {
            theirs.EpsilonLogitsWarper,
            theirs.EtaLogitsWarper,
            theirs.InfNanRemoveLogitsProcessor,
            theirs.LogitNormalization,
            theirs.MinPLogitsWarper,
            theirs.SuppressTokensLogitsProcessor,
            theirs.TemperatureLogitsWarper,
            theirs.TopKLogitsWarper,
            theirs.TopPLogitsWarper,
            theirs.TypicalLogitsWarper,
        }
    )


def warp_of(processors: Sequence[LogitsProcessor]) -> tuple[list[LogitsProcessor], Warp]:
    """Return the processors before the last ones that our kernels know, and those."""
    from transformers.generation import logits_process as theirs

    first, known = list(processors), {}
    kinds = (
        (theirs.TopPLogitsWarper, "top_p"),
        (theirs.TopKLogitsWarper, "top_k"),
        (theirs.TemperatureLogitsWarper, "temperature"),
    )
    for kind, name in kinds:
        last = first[-1] if first else None
        usual = getattr(last, "filter_value", -math.inf) == -math.inf and getattr(last, "min_tokens_to_keep", 1) == 1
        if type(last) is kind and usual:
            known[name] = getattr(first.pop(), name)
    return first, Warp(**known)


class NonFiniteLogitsError(RuntimeError):
    """The model, or a logits processor, produced logits without a usable distribution."""


def non_finite(where: str) -> NonFiniteLogitsError:
    """Make the error for NaN logits, or a row to sample from whose tokens are all masked or one infinitely likely."""
    return NonFiniteLogitsError(
        f"no usable next-token distribution at {where}: the logits hold NaN, or the logits processors masked every token "
        "that could be drawn. "
        "In float16 try dtype='bfloat16' or 'float32'; else check the checkpoint's weights and the processors"
    )


class Sampler:
    """Turns logits into processed logits, distributions and tokens, alike for drafts (q) and the target (p).

    processors: transformers' list; each must be a pure function of (input_ids, scores), since a row may be processed both
        as a draft and as a verified position.
    generator: source of all randomness when sampling; None when greedy.
    rewinds: whether the generator may be set back to an earlier state, because nobody else draws from it.
    native: whether our kernels compute on the tensors that are handed in. Else PyTorch's operators do.
    prefix_free: whether all rows can be processed in one call, because no processor looks at the text.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        generator: torch.Generator | None,
        *,
        rewinds: bool = False,
        native: bool = False,
    ) -> None:
        self.processors, self.generator, self._rewinds, self.native = processors, generator, rewinds, native
        self.prefix_free = all(type(p) in prefix_free() for p in processors)
        self._before_warp, self._warp = warp_of(processors)

    @property
    def do_sample(self) -> bool:
        """True if tokens are drawn, False if the argmax is taken."""
        return self.generator is not None

    def state(self) -> Tensor | None:
        """Return what `rewind` takes to draw the same once more; None if there is nothing to set back."""
        return self.generator.get_state() if self.generator is not None and self._rewinds else None

    def rewind(self, state: Tensor) -> None:
        """Draw again what was drawn since `state`."""
        assert self.generator is not None
        self.generator.set_state(state)

    def process(
        self, logits: Tensor, tokens: Tensor, length: int, processors: Sequence[LogitsProcessor] | None = None
    ) -> Tensor:
        """Apply the processors, all by default; row i sees exactly the text that precedes the token it predicts.

        logits: float32 [rows, vocab]. tokens: int64 [1, >= length + rows - 1], the text, drafts included. length: tokens
        before row 0's prediction. Returns [rows, vocab], in float32 unless a processor returns another type.
        """
        processors = self.processors if processors is None else processors
        if not processors:
            return logits
        rows = [logits] if self.prefix_free else [row.clone() for row in logits.split(1)]
        for index in range(len(rows)):
            # What calling transformers' list does, without its inspecting every processor's signature at every token.
            for processor in processors:
                rows[index] = processor(tokens[:, : length + index], rows[index])
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def probabilities(self, logits: Tensor, tokens: Tensor, length: int, out: Tensor | None = None) -> Tensor:
        """Compute the float32 distribution after the processors, [rows, vocab]; other arguments as in `process`.

        out: float32 [rows, vocab], where to write it; a new tensor by default.
        """
        scores, others = logits, None  # all processors
        if self.native:
            scores = self.process(logits, tokens, length, self._before_warp)
            if takes(scores):
                out = torch.empty_like(scores) if out is None else out
                distribute(scores, self._warp, out)
                return out
            others = self.processors[
                len(self._before_warp) :
            ]  # a processor made another type of it, which the operators take
        scores = self.process(scores, tokens, length, others)
        p = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).float()
        return p if out is None else out.copy_(p)

    def next_token(self, logits: Tensor, tokens: Tensor, length: int) -> int:
        """Take the next token as plain decoding does: drawn, or the likeliest one.

        logits: [1, vocab]; the other arguments as in `process`. Raises NonFiniteLogitsError, naming the position, for NaN
        logits, and when sampling for a row in which every token is masked.
        """
        where = f"position {length}"
        if self.do_sample:
            return self.sample(logits, tokens, length, torch.empty_like(logits, dtype=torch.float32), where)
        # As in transformers, a row in which every token is masked gives token 0, and an infinite logit wins.
        value, token = self.process(logits, tokens, length)[0].max(dim=-1)
        if value != value:
            raise non_finite(where)
        return int(token)

    def sample(self, logits: Tensor, tokens: Tensor, length: int, out: Tensor, where: str) -> int:
        """`probabilities` of one row, [1, vocab], and a draw from it. Raises NonFiniteLogitsError as `draw`."""
        if self.native and takes(out):
            scores = self.process(logits, tokens, length, self._before_warp)
            if takes(scores):
                token = sample(scores, self._warp, self._uniform(), out)
                if token is None:
                    raise non_finite(where)
                return token
        self.probabilities(logits, tokens, length, out)
        return self.draw(out[0], where)

    def accept(
        self, logits: Tensor, tokens: Tensor, length: int, drafts: Sequence[int], q: Tensor, *, copied: bool
    ) -> Accepted | None:
        """Judge drafts and draw the token after them in one call (`accept_drafts`); None where our kernels do not.

        Draws the same random numbers in the same order as `uniforms` and then `draw`.
        """
        if not (self.native and self.prefix_free):
            return None
        scores = self.process(logits, tokens, length, self._before_warp)
        if not takes(scores):
            return None
        uniforms = self.uniforms(len(drafts), scores.device) if drafts else []
        return accept_drafts(scores, self._warp, drafts, q, uniforms, self._uniform(), copied=copied)

    def overlap(self, logits: Tensor, tokens: Tensor, length: int, p: Tensor) -> Tensor:
        """Chance that a draft from each row of these logits would be accepted, [rows]: `acceptance_probabilities`.

        p: [rows, vocab]; other arguments as in `process`. 0 where a processor refuses the logits: a draft would end there.
        """
        try:
            return acceptance_probabilities(p, self.probabilities(logits, tokens, length))
        except Exception:
            return torch.zeros_like(p[:, 0])

    def without_text(self) -> Sampler:
        """Return a sampler with those processors that do not look at the text: for rows that nobody else processes."""
        kept = [processor for processor in self.processors if type(processor) in prefix_free()]
        return self if self.prefix_free else Sampler(type(self.processors)(kept), self.generator, native=self.native)

    def draw(self, weights: Tensor, where: str) -> int:
        """One token from unnormalised probabilities [vocab]. A token of weight 0 is never drawn.

        Raises NonFiniteLogitsError (a RuntimeError) if the weights hold NaN or are all 0.
        """
        token: int | None = None
        if self.native and takes(weights):
            token = draw(weights, self._uniform())
        elif 0 < float(weights.sum()) < math.inf:
            token = int(torch.multinomial(weights, 1, generator=self.generator))
        if token is None:
            raise non_finite(where)
        return token

    def _uniform(self) -> float:
        """Draw a number in [0, 1) for a draw by our kernels."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64, device="cpu"))

    def uniforms(self, count: int, device: torch.device) -> list[float]:
        """Draw so many numbers of 24 bits, uniform in [0, 1)."""
        return torch.rand(count, generator=self.generator, dtype=torch.float32, device=device).tolist()
