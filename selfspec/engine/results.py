"""What a round gives a sequence, what a step of the engine gives it, and what a whole call returns."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from traceback import walk_tb

from torch import Tensor

from policies import RoundRecord
from policies.records import StopCause
from selfspec.engine.stats import GenerationStats
from selfspec.engine.stopping import StopReason

_SHOWN = 60  # characters, or ids, of the new text in a repr


def without_traceback(error: Exception) -> Exception:
    """Rid the error, and those that led to it, of tracebacks; from Python 3.11 on a note tells where each was raised.

    The functions in a traceback, and those that called them, hold what keeps the error: with it, all that they refer to would
    stay until Python looks for circles.
    """
    known: set[BaseException] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in known:
            continue
        known.add(one)
        waiting += one.__cause__, one.__context__
        if one.__traceback__ is not None and sys.version_info >= (3, 11):
            frames = ((frame.f_code, line) for frame, line in walk_tb(one.__traceback__))
            places = (f'  File "{code.co_filename}", line {line}, in {code.co_name}' for code, line in frames)
            one.add_note("\n".join(["Raised in, outermost first:", *places]))
        one.__traceback__ = None
    return error


@dataclass(slots=True, kw_only=True, eq=False)
class RoundResult:
    """What a round yields for one text.

    draft_tokens: the kept drafts d_1..d_k, the first num_accepted (m) of which were accepted. block: m + 1 tokens to commit.
    target_tokens: int64, the full model's choice for rows 0..m at least, None if nobody learns from it; p: the distributions
        it was made from when sampling, else None.
    failure: why the last entry of the block is not a token, else None. The text ends with it if it gets that far.
    dropped_token: what a greedy draft would have taken from the row that a policy stopped before, else None.
    error: why the text cannot go on at all: its policy raised it, or a processor did.
    num_copied: how many of the kept drafts were copied.
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

    @staticmethod
    def broken(error: Exception | None) -> RoundResult:
        """Make the result of a sequence that cannot go on."""
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
