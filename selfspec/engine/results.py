"""What a step of the engine gives a sequence, what a whole call returns, and what it cost and yielded.

Statistics are counted one way everywhere. Names follow the field: accepted_per_round counts drafts only, tokens_per_round the
token of the target as well. Nothing after a stop is counted, and the token from prefill and prefill's layers are outside
rounds.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from traceback import walk_tb
from typing import Any

from torch import Tensor

from policies import RoundRecord
from selfspec.engine.stopping import StopReason

_SHOWN = 60  # characters, or ids, of the new text in a repr


def without_traceback(error: Exception) -> Exception:
    """Rid the error, and those that led to it, of tracebacks; from Python 3.11 on a note tells where each was raised.

    A traceback holds the functions that keep the error: all that they refer to would stay until Python looks for circles.
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
        """Return whether the sequence is complete or cannot go on."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Statistics of one call.

    num_reused_tokens: of the prompt, whose keys and values an earlier text had left; prefill read the others.
    num_new_tokens: with the first one, which prefill yields. acceptance_rate and accepted_per_round: None if nothing was
    drafted. etpl: tokens committed in rounds / layers loaded in rounds (DEL's eTPL; 1/L for plain decoding), None without
    a round. rounds_by_exit_layer, rounds_by_length: rounds by exit layer and by number of drafted tokens (0: a round without
    speculation), keys ascending; rounds_by_accepted: those with drafts, by the number that was accepted. seconds and
    tokens_per_second include prefill; decode_tokens_per_second is that of the rounds. calibration_seconds: time to set the
    policy up. A policy that uses measured costs times the model when it is first used, and "auto" may make a copy of the
    weights to draft with, each once per model and process; tokens_per_second and decode_tokens_per_second leave that out,
    seconds does not. time_to_first_token: seconds from the call to the first committed token, tokenisation included. Times
    of a text in a batch are from when it joins the others. num_copied, num_copied_accepted: of num_drafted and
    num_accepted, those that were copied from the text. preverifier_layers: passes of a stopping policy's own layer
    (Pacer's), not among loaded_layers; etpl_charged counts both. *_seconds: host time per phase, on a
    CPU the processor time of rounds; a plan counts as drafting if it drafts, else as learning. On an asynchronous device a
    phase includes waiting for what the earlier ones queued.
    kernels: which variant of our own kernels ran the layers ("avx2", ..), None where PyTorch's operators did.
    """

    num_prompt_tokens: int
    num_reused_tokens: int
    num_new_tokens: int
    rounds: int
    num_drafted: int
    num_accepted: int
    num_copied: int
    num_copied_accepted: int
    acceptance_rate: float | None
    accepted_per_round: float | None
    tokens_per_round: float | None
    loaded_layers: int
    etpl: float | None
    preverifier_layers: int
    etpl_charged: float | None
    rounds_by_exit_layer: Mapping[int, int]
    rounds_by_length: Mapping[int, int]
    rounds_by_accepted: Mapping[int, int]
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float | None
    time_to_first_token: float
    calibration_seconds: float
    prefill_seconds: float
    draft_seconds: float
    preverify_seconds: float
    verify_seconds: float
    accept_seconds: float
    learn_seconds: float
    other_seconds: float
    peak_cache_bytes: int
    runner: str
    kernels: str | None

    def as_dict(self) -> dict[str, Any]:
        """Give the fields as JSON has them: the counts' keys are text."""
        fields = asdict(self)
        for name in ("rounds_by_exit_layer", "rounds_by_length", "rounds_by_accepted"):
            fields[name] = {str(key): count for key, count in fields[name].items()}
        return fields


class StatsBuilder:
    """Adds rounds up while they happen."""

    def __init__(self) -> None:
        self.rounds = self.round_tokens = self.loaded_layers = self.preverifier_layers = 0
        self.num_drafted = self.num_accepted = self.num_copied = self.num_copied_accepted = 0
        self.exit_layers: Counter[int] = Counter()
        self.lengths: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()
        self.draft_seconds = self.preverify_seconds = self.verify_seconds = 0.0
        self.accept_seconds = self.learn_seconds = 0.0
        self.setup_seconds = 0.0  # part of calibration_seconds: the policy's, in the middle of the text

    def add(self, record: RoundRecord) -> None:
        """Count one round."""
        drafted, accepted = record.counted_drafts
        copied, copied_accepted = record.counted_copies
        self.rounds += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.num_copied += copied
        self.num_copied_accepted += copied_accepted
        self.round_tokens += len(record.tokens)
        self.loaded_layers += record.loaded_layers
        self.preverifier_layers += record.preverifier_layers
        self.exit_layers[record.exit_layer or 0] += 1
        self.lengths[record.num_drafted] += 1
        self.accepted[accepted] += bool(drafted)
        self.draft_seconds += record.draft_seconds
        self.preverify_seconds += record.preverify_seconds
        self.verify_seconds += record.verify_seconds

    def finish(
        self, *, seconds: float, first_token: float, calibration_seconds: float = 0.0, **known: Any
    ) -> GenerationStats:
        """Make the statistics. seconds: of the whole call; first_token: until the first token was committed.

        known: fields of `GenerationStats` as they are. Of rounds that an error broke off, only the tokens are known.
        """
        calibration_seconds += self.setup_seconds
        decode_seconds = seconds - first_token - self.setup_seconds
        phases = calibration_seconds + known["prefill_seconds"] + self.draft_seconds + self.preverify_seconds
        phases += self.verify_seconds + self.accept_seconds + self.learn_seconds
        counted = {name: value for name, value in vars(self).items() if name in GenerationStats.__slots__}
        return GenerationStats(
            **counted,
            **known,
            acceptance_rate=ratio(self.num_accepted, self.num_drafted),
            accepted_per_round=ratio(self.num_accepted, self.rounds) if self.num_drafted else None,
            tokens_per_round=ratio(self.round_tokens, self.rounds),
            etpl=ratio(self.round_tokens, self.loaded_layers),
            etpl_charged=ratio(self.round_tokens, self.loaded_layers + self.preverifier_layers),
            rounds_by_exit_layer=dict(sorted(self.exit_layers.items())),
            rounds_by_length=dict(sorted(self.lengths.items())),
            rounds_by_accepted=dict(sorted(self.accepted.items())),
            seconds=seconds,
            tokens_per_second=known["num_new_tokens"] / (seconds - calibration_seconds),
            decode_tokens_per_second=ratio(self.round_tokens, decode_seconds) if self.rounds else None,
            time_to_first_token=first_token,
            calibration_seconds=calibration_seconds,
            other_seconds=max(0.0, seconds - phases),
        )


def sources_text(stats: GenerationStats) -> str:
    """Say how many drafts were copied and how many an exit made, and how many of each were accepted."""
    drafted, accepted = stats.num_drafted - stats.num_copied, stats.num_accepted - stats.num_copied_accepted
    copies = f"copied from earlier text: {stats.num_copied_accepted} of {stats.num_copied} accepted"
    return f"{copies}; drafted by an exit: {f'{accepted} of {drafted} accepted' if drafted else 'none'}"


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator, or None (unknown) where the denominator is 0."""
    return numerator / denominator if denominator else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known; None if nothing is."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
