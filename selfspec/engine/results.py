"""What a round gives a sequence, what a step of the engine gives it, and what a whole call returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policies import RoundRecord
from policies.records import StopCause
from selfspec.engine.stats import GenerationStats
from selfspec.engine.stopping import StopReason

_SHOWN = 60  # characters, or ids, of the new text in a repr


@dataclass(slots=True, kw_only=True, eq=False)
class RoundResult:
    """What a round yields for one text.

    draft_tokens: the kept drafts d_1..d_k, the first num_accepted (m) of which were accepted. block: m + 1 tokens to commit.
    target_tokens: int64, the full model's choice for rows 0..m at least, None if nobody learns from it; p: the distributions
        it was made from when sampling, else None.
    failure: why the last entry of the block is not a token, else None. It is raised if the text gets that far.
    dropped_token: what a greedy draft would have taken from the row that a policy stopped before, else None.
    error: why the text cannot go on at all: its policy raised it, or a processor did.
    num_copied: how many of the kept drafts were copied. num_discarded: rows run ahead of a decision to drop their token.
    The rest as in `RoundRecord`.
    """

    draft_tokens: tuple[int, ...]
    num_accepted: int
    block: list[int]
    target_tokens: Tensor | None
    p: Tensor | None
    stop_cause: StopCause
    confidences: tuple[float, ...] | None
    acceptance_probabilities: tuple[float, ...] | None
    failure: Exception | None = None
    error: Exception | None = None
    dropped_token: int | None = None
    num_copied: int = 0
    num_discarded: int = 0

    @staticmethod
    def broken(error: Exception | None) -> RoundResult:
        """The result of a sequence that cannot go on."""
        return RoundResult(
            draft_tokens=(),
            num_accepted=0,
            block=[],
            target_tokens=None,
            p=None,
            stop_cause="none",
            confidences=None,
            acceptance_probabilities=None,
            error=error,
        )

    @property
    def dropped_acceptance(self) -> float | None:
        """See `RoundRecord`: known where every draft before it was accepted."""
        if self.dropped_token is None or self.failure is not None or self.num_accepted < len(self.draft_tokens):
            return None
        return float(self.block[-1] == self.dropped_token)


@dataclass(slots=True, kw_only=True, eq=False)
class StepOutput:
    """What a step of the engine brought for one sequence.

    tokens: committed now; the first one comes when the prompt has been read. record: of the round, None for a prompt.
    error: why the sequence cannot go on; the engine has forgotten it then. ticket: what `Engine.add` returned for it.
    result: set when the sequence is complete.
    """

    tokens: list[int]
    record: RoundRecord | None = None
    error: Exception | None = None
    ticket: int = 0
    result: GenerationResult | None = None

    @property
    def ended(self) -> bool:
        """Whether the sequence is complete or cannot go on."""
        return self.result is not None or self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class GenerationResult:
    """What `generate` returns.

    sequences: int64 [1, prompt + new] on the CPU. text: the new text without special tokens, None without a tokenizer.
    policy: the name of the policy that ran. trace: every round's record, None unless asked for.
    """

    sequences: Tensor
    text: str | None
    stop_reason: StopReason
    stats: GenerationStats
    policy: str
    trace: tuple[RoundRecord, ...] | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The generated ids, the EOS token included if there was one."""
        return self.sequences[0, self.stats.num_prompt_tokens :].tolist()

    def __repr__(self) -> str:
        new, stats = self.new_tokens if self.text is None else self.text, self.stats
        shown = repr(new[:_SHOWN]) + ("..." if len(new) > _SHOWN else "")
        return (
            f"GenerationResult({shown}, {stats.num_new_tokens} tokens, stop_reason={self.stop_reason!r}, "
            f"policy={self.policy!r}, {stats.tokens_per_second:.0f} tokens/s)"
        )
