"""Many texts in one pass: texts join and leave between rounds, and whoever drives the engine gets results as they come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from layerskip_models.kernels.threads import settle as settle_threads
from layerskip_models.prefill import MOST_ROWS
from policies import Policy, RoundRecord
from selfspec.messages import Messages
from selfspec.parallel.agreement import agree_on_call
from selfspec.passes import CaptureError, Passes
from selfspec.request import Request
from selfspec.round import Committed, read_prompts, run_round
from selfspec.runtime.model_source import BoundModel
from selfspec.runtime.policy_use import Company
from selfspec.runtime.torch_mode import engine_mode
from selfspec.sampling import NonFiniteLogitsError
from selfspec.shadow import settle
from selfspec.stats import GenerationStats
from selfspec.stop_conditions import StopReason
from selfspec.text import Text

PIECE_ROWS = 64
"""Rows of prompts that are read between two rounds while other texts decode: none of them waits longer than for that."""
FULL_ROWS = 128
"""Rows from which on a pass is bound by arithmetic, and another prompt in it would only delay the first."""
_SHOWN = 60  # characters, or ids, of the new text in a repr


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checked:
    """A checked call of `generate`, bound to the model as it was then.

    started: `perf_counter` when the user called. calibration_seconds: spent since then on the policy. tokenizer: for the
    result's text, None for none. ended: told how long the call took in all.
    """

    bound: BoundModel
    request: Request
    policy: Policy
    tokenizer: PreTrainedTokenizerBase | None
    started: float
    calibration_seconds: float
    keep_trace: bool
    ended: Callable[[float], None]


@dataclass(slots=True, kw_only=True, eq=False)
class Progress:
    """What a step brought for one text.

    ticket: what `Engine.add` returned for it. tokens: committed now; a prompt's end brings the first one. record: of the
    round. result: when the text is complete. error: why it cannot go on; the engine has forgotten it then.
    """

    ticket: int
    tokens: list[int]
    record: RoundRecord | None = None
    result: GenerationResult | None = None
    error: Exception | None = None


class Engine:
    """Decodes texts together. Made by `SelfSpecGenerator.engine`; for one thread at a time.

    Every text has its own KV cache, policy state and random generator. A row's price falls as texts join, since all share
    one reading of the weights; policies that measure cost know how many share a round. On a CPU with our own kernels a text
    gets bit for bit what it would get alone, but for sampling with a policy that decides by measured time ("auto").

    On CUDA a text that is alone runs as captured graphs; texts in company run eagerly, and so does from then on the one
    that was alone.
    """

    def __init__(self, check: Callable[..., Checked] | None = None) -> None:
        self._check = check
        self._next = 0
        self._seats: dict[int, _Seat] = {}
        self._company = Company()
        self._passes: dict[BoundModel, tuple[Passes, ExitStack]] = {}  # eager ones, for each copy of the weights in use

    def __len__(self) -> int:
        """Texts that are not complete."""
        return len(self._seats)

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV caches of its texts."""
        return sum(seat.cache_bytes for seat in self._seats.values())

    def add(self, prompt: str | list[int] | Tensor | Messages | None = None, **options: object) -> int:
        """Let a text join. Arguments and errors are those of `SelfSpecGenerator.generate`, without `streamer`.

        Returns its ticket. Nothing is run before the next step.
        """
        assert self._check is not None
        return self.join(self._check(prompt, **options))

    def join(self, checked: Checked, following: int = 0) -> int:
        """Let an already checked call join. following: others that join before the next step, so that policies know."""
        self._next += 1
        self._seats[self._next] = _Seat(self._next, checked, self._company, len(self._seats) + 1 + following)
        return self._next

    def cancel(self, ticket: int) -> None:
        """Let a text go. What it held is free at once. Does nothing for a text that is complete."""
        seat = self._seats.pop(ticket, None)
        if seat is not None:
            seat.close()

    def close(self) -> None:
        """Cancel all texts, and give back what the engine holds."""
        for ticket in [*self._seats]:
            self.cancel(ticket)
        self._let_go()
        settle_threads()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> list[Progress]:
        """Read the next piece of waiting prompts, then run one round of all texts that are past theirs.

        Returns what each text got that got anything; nothing may have come of a step that only read. Raises what concerns the
        engine as a whole (no memory, say); an error of one text is in its `Progress`, and the others go on.
        """
        found: list[Progress] = []
        for seats in self._by_model():
            model = seats[0].checked.bound.model
            # PyTorch's state and the policies' locks are left while whoever reads the tokens is at work.
            with engine_mode(model.device), model.on_one_team(), _Locked(seats):
                waiting = [seat for seat in seats if seat.text.reading]
                going = [seat for seat in seats if not seat.text.reading] if waiting else seats
                committed = self._read(waiting, alone=not going) if waiting else []
                if going:
                    committed += zip(going, self._round(going))
            found += [self._progress(seat, result) for seat, result in committed]
        return found

    def _by_model(self) -> list[list[_Seat]]:
        """Texts whose passes can be shared: those of one copy of the weights."""
        groups: dict[BoundModel, list[_Seat]] = {}
        for seat in self._seats.values():
            groups.setdefault(seat.checked.bound, []).append(seat)
        return [*groups.values()]

    def _read(self, waiting: list[_Seat], alone: bool) -> list[tuple[_Seat, Committed]]:
        """Read prompts in the order in which they came, several in a pass if they are short.

        alone: no text is past its prompt, so nobody waits for this pass, which may be as long as memory allows.
        """
        texts = {seat.text: seat for seat in waiting}
        most, enough = (MOST_ROWS, FULL_ROWS) if alone else (PIECE_ROWS, PIECE_ROWS)
        return [(texts[text], committed) for text, committed in read_prompts([*texts], most, enough)]

    def _round(self, seats: list[_Seat]) -> list[Committed]:
        """One round of these texts, captured where there is one that can be, eager else."""
        texts = [seat.text for seat in seats]
        captured = seats[0].captured if len(self._seats) == 1 else None
        if captured is None:
            for seat in seats:
                seat.leave_captures()
            return run_round(texts, self._eager(seats[0].checked.bound))
        try:
            return run_round(texts, captured)
        except CaptureError as error:
            seats[0].leave_captures()
            seats[0].checked.bound.runners.give_up_graphs(error)
        texts[0].read_again()  # graphs may have written anywhere in the cache
        return run_round(texts, self._eager(seats[0].checked.bound))

    def _eager(self, bound: BoundModel) -> Passes:
        if bound not in self._passes:
            self._let_go()
            held = ExitStack()
            self._passes[bound] = held.enter_context(bound.runners.eager_passes()), held
        return self._passes[bound][0]

    def _let_go(self) -> None:
        """Give back the passes of copies of the weights that no text is on any more."""
        in_use = {seat.checked.bound for seat in self._seats.values()}
        for bound in self._passes.keys() - in_use:
            self._passes.pop(bound)[1].close()

    def _progress(self, seat: _Seat, committed: Committed) -> Progress:
        """Count what a text got, and let it go if it is complete or cannot go on."""
        result = None
        if committed.error is None:
            seat.count(committed.record)
            result = seat.result() if seat.text.stop_reason is not None else None
        elif isinstance(committed.error, NonFiniteLogitsError):
            seat.clear()
        if result is not None or committed.error is not None:
            seat.leaves_text = committed.error is None
            self.cancel(seat.ticket)
        return Progress(
            ticket=seat.ticket, tokens=committed.tokens, record=committed.record, result=result, error=committed.error
        )


class _Locked:
    """Holds the locks of texts' policies."""

    __slots__ = ("_locks",)

    def __init__(self, seats: list[_Seat]) -> None:
        self._locks = [seat.at_work for seat in seats]

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *error: object) -> None:
        for lock in reversed(self._locks):
            lock.release()


class _Seat:
    """A text in the engine, with what it holds on to, and what its result will say."""

    def __init__(self, ticket: int, checked: Checked, company: Company, texts: int) -> None:
        self.ticket, self.checked = ticket, checked
        self._held = ExitStack()
        self._records: list[RoundRecord] = []
        self._first_token_seconds = 0.0
        self._closed = False
        self.leaves_text = False
        """Whether a later text may go on from this one's rows."""
        bound, request = checked.bound, checked.request
        try:
            self._place = self._held.enter_context(
                bound.runners.lend(request.prompt.numel() + request.stops.max_new_tokens, request.prompt)
            )
            agree_on_call(bound.model, request, checked.policy)
            policy, self.at_work = self._held.enter_context(company.use(checked.policy))
            self.captured = self._place.captured
            with engine_mode(bound.model.device), self.at_work:
                policy.expect_company(texts)
                self.text = Text(bound.model, self._place.cache, request, policy, self._place.kept, bound.runners.kind)
            self._place.share(self.text.prompt_read)
            needs = self.text.needs
            if needs.context_layers or needs.features or needs.copies == "needed":
                self.captured = None  # captures do none of this
            self._captures = 0, 0.0
            if self.captured is not None:
                self._captures = self.captured.num_captures, self.captured.capture_seconds
                self.captured.begin()
            self.leaves_text = True
        except BaseException:
            self.close()
            raise

    @property
    def cache_bytes(self) -> int:
        return self._place.cache.num_bytes

    def leave_captures(self) -> None:
        """From now on this text runs eagerly."""
        if self.captured is not None:
            self.captured.leave()
            self.captured = None

    def count(self, record: RoundRecord | None) -> None:
        """A round, or the prompt's end, was committed."""
        if record is None:
            self._first_token_seconds = perf_counter() - self.checked.started
        elif self.checked.keep_trace:
            self._records.append(settle(record))

    def clear(self) -> None:
        """The text broke off on NaN."""
        if self._place.captured is not None:
            self._place.captured.clear()

    def close(self) -> None:
        """Give everything back."""
        if not self._closed:
            self._closed = True
            if self.leaves_text and self.checked.bound.runners.reuses:
                self._place.leave(self.text.tokens[0, : self.text.settled], self.text.states.kept)
            self._held.close()
            self.checked.ended(perf_counter() - self.checked.started)

    def result(self) -> GenerationResult:
        """Of a complete text."""
        checked, text = self.checked, self.text
        num_prompt = checked.request.prompt.numel()
        sequences = text.tokens[:, : text.length].to("cpu", copy=True)
        words = None
        if checked.tokenizer is not None:
            words = checked.tokenizer.decode(sequences[0, num_prompt:], skip_special_tokens=True)
            assert isinstance(words, str)
        captures, kind = (0, 0.0), "eager"
        if self._place.captured is not None:
            made = self._place.captured
            captures = made.num_captures - self._captures[0], made.capture_seconds - self._captures[1]
            kind = "eager" if self.captured is None else "captured"
        stats = text.stats.finish(
            num_prompt_tokens=num_prompt,
            num_reused_tokens=text.num_reused,
            seconds=perf_counter() - checked.started,
            prefill_seconds=text.prefill_seconds,
            calibration_seconds=checked.calibration_seconds,
            first_token=self._first_token_seconds,
            cache_bytes=self._place.cache.num_bytes,
            runner=kind,
            # What is captured are PyTorch's operators.
            kernels=checked.bound.model.kernels if kind == "eager" else None,
            num_captures=captures[0],
            capture_seconds=captures[1],
        )
        assert text.stop_reason is not None
        return GenerationResult(
            sequences=sequences,
            text=words,
            stop_reason=text.stop_reason,
            stats=stats,
            policy=checked.policy.name,
            trace=tuple(self._records) if checked.keep_trace else None,
        )
