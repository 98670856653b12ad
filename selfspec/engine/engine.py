"""Many texts in one pass: texts join and leave between rounds, and whoever drives the engine gets results as they come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from layerskip_models.kernels.threads import reclaim_buffers
from layerskip_models.prefill import MOST_ROWS
from policies import Policy, RoundRecord
from selfspec.engine.agreement import agree_on_call
from selfspec.engine.model_source import BoundModel
from selfspec.engine.policy_use import SharedPolicies
from selfspec.engine.request import Request
from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.round import Found, read_prompts, run_round, tell
from selfspec.engine.runners.cuda_graph.runner import CudaGraphRunner
from selfspec.engine.runners.runner import CaptureError, Runner
from selfspec.engine.sampling import NonFiniteLogitsError
from selfspec.engine.sequence import Sequence
from selfspec.engine.shadow import settle
from selfspec.engine.torch_mode import engine_mode
from selfspec.messages import Messages

PIECE_ROWS = 64
"""Rows of prompts that are read between two rounds while other texts decode: none of them waits longer than for that."""
FULL_ROWS = 128
"""Rows from which on a pass is bound by arithmetic, and another prompt in it would only delay the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundRequest:
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


class Engine:
    """Decodes texts together. Made by `SelfSpecGenerator.engine`; for one thread at a time.

    Every text has its own KV cache, policy state and random generator. A row's price falls as texts join, since all share
    one reading of the weights; policies that measure cost know how many share a round. On a CPU with our own kernels a text
    gets bit for bit what it would get alone, but for sampling with a policy that decides by measured time ("auto").

    On CUDA a text that is alone runs as captured graphs, and texts that share a batch run eagerly. A text that began alone
    goes back to its captures when it is alone again.
    """

    def __init__(self, check: Callable[..., BoundRequest] | None = None) -> None:
        self._check = check
        self._next = 0
        self._slots: dict[int, BatchSlot] = {}
        self._company = SharedPolicies()
        self._runners: dict[
            BoundModel, tuple[Runner, ExitStack]
        ] = {}  # eager ones, for each copy of the weights in use
        # What texts got in this step, and what of that is ready to be returned. A step that raises leaves both to the next.
        self._got: Found = []
        self._outputs: list[StepOutput] = []

    def __len__(self) -> int:
        """Texts that are not complete, or whose end `step` has not returned yet because it raised."""
        return len(self._slots) + len({output.ticket for output in self._outputs} - self._slots.keys())

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV caches of its texts."""
        return sum(slot.cache_bytes for slot in self._slots.values())

    def add(self, prompt: str | list[int] | Tensor | Messages | None = None, **options: object) -> int:
        """Let a text join. Arguments and errors are those of `SelfSpecGenerator.generate`, without `streamer`.

        Returns its ticket. Nothing is run before the next step.
        """
        assert self._check is not None
        return self.join(self._check(prompt, **options))

    def join(self, checked: BoundRequest, following: int = 0) -> int:
        """Let an already checked call join. following: others that join before the next step, so that policies know."""
        self._next += 1
        self._slots[self._next] = BatchSlot(self._next, checked, self._company, len(self._slots) + 1 + following)
        return self._next

    def cancel(self, ticket: int) -> None:
        """Let a text go. What it held is free at once. Does nothing for a text that is complete."""
        self._outputs = [output for output in self._outputs if output.ticket != ticket]
        self._leave(ticket)

    def _leave(self, ticket: int) -> None:
        slot = self._slots.get(ticket)
        if slot is not None:
            slot.close()
            self._slots.pop(ticket, None)

    def close(self) -> None:
        """Cancel all texts, and give back what the engine holds."""
        for ticket in [*self._slots]:
            self.cancel(ticket)
        self._let_go()
        reclaim_buffers()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self) -> list[StepOutput]:
        """Read the next piece of waiting prompts, then run one round of all texts that are past theirs.

        Returns what each text got that got anything; nothing may have come of a step that only read. An error of one text is
        in its `StepOutput`, and the others go on.

        Raises what concerns the engine as a whole: no memory, say, or Ctrl-C. Nothing is lost then. Every text goes on from
        what it had committed, and the next step returns what this one had found. Greedy texts, and texts that sample with a
        seed and a policy that does not learn, come out as without the error. Other sampled texts are still drawn from the
        model's distribution. Records of rounds that were broken off may be missing in the statistics and the trace.
        """
        self._catch_up()
        for slots in self._by_model():
            model = slots[0].checked.bound.model
            # PyTorch's state and the policies' locks are left while whoever reads the tokens is at work.
            with engine_mode(model.device), model.on_one_team(), _Locked(slots):
                waiting = [slot for slot in slots if slot.sequence.reading]
                going = [slot for slot in slots if not slot.sequence.reading] if waiting else slots
                if waiting:
                    self._read(waiting, alone=not going)
                if going:
                    self._round(going)
            self._report()
        for output in self._outputs:
            if output.ended:
                self._leave(output.ticket)
        found, self._outputs = self._outputs, []
        return found

    def _catch_up(self) -> None:
        """Report what a step that broke off has left; nothing after one that did not."""
        self._report()
        for slot in [*self._slots.values()]:
            if slot.sequence.unsent:
                tell(slot.sequence, self._got, StepOutput(tokens=slot.sequence.unsent))
        self._report()

    def _report(self) -> None:
        """Turn what sequences got into what the caller gets."""
        slots = {slot.sequence: slot for slot in self._slots.values()} if self._got else {}
        while self._got:
            sequence, output = self._got[0]
            slot = slots.get(sequence)
            outputs = [] if slot is None else [self._completed(slot, output)]
            # Nothing is called here, so no signal comes between: see `tell`.
            self._outputs, self._got = [*self._outputs, *outputs], self._got[1:]

    def _by_model(self) -> list[list[BatchSlot]]:
        """Texts whose passes can be shared: those of one copy of the weights."""
        groups: dict[BoundModel, list[BatchSlot]] = {}
        ended = {output.ticket for output in self._outputs if output.ended}
        for slot in self._slots.values():
            if slot.ticket not in ended:
                groups.setdefault(slot.checked.bound, []).append(slot)
        return [*groups.values()]

    def _read(self, waiting: list[BatchSlot], alone: bool) -> None:
        """Read prompts in the order in which they came, several in a pass if they are short.

        alone: no text is past its prompt, so nobody waits for this pass, which may be as long as memory allows.
        """
        most, enough = (MOST_ROWS, FULL_ROWS) if alone else (PIECE_ROWS, PIECE_ROWS)
        read_prompts([slot.sequence for slot in waiting], most, enough, self._got)

    def _round(self, slots: list[BatchSlot]) -> None:
        """One round of these texts, captured where there is one that can be, eager else."""
        texts = [slot.sequence for slot in slots]
        captured = slots[0].captures() if len(self._slots) == 1 else None
        if captured is None:
            for slot in slots:
                slot.leave_captures()
            run_round(texts, self._eager(slots[0].checked.bound), self._got)
            return
        try:
            run_round(texts, captured, self._got)
            return
        except CaptureError as error:
            slots[0].leave_captures(for_good=True)
            slots[0].checked.bound.runners.give_up_graphs(error)
        except BaseException:
            captured.begin()  # what was launched ahead belongs to a round that broke off
            raise
        texts[0].read_again()  # graphs may have written anywhere in the cache
        run_round(texts, self._eager(slots[0].checked.bound), self._got)

    def _eager(self, bound: BoundModel) -> Runner:
        if bound not in self._runners:
            self._let_go()
            held = ExitStack()
            self._runners[bound] = held.enter_context(bound.runners.eager_runner()), held
        return self._runners[bound][0]

    def _let_go(self) -> None:
        """Give back the passes of copies of the weights that no text is on any more."""
        in_use = {slot.checked.bound for slot in self._slots.values()}
        for bound in self._runners.keys() - in_use:
            self._runners.pop(bound)[1].close()

    def _completed(self, slot: BatchSlot, output: StepOutput) -> StepOutput:
        """Count what a sequence got, and add its result when it is complete. An error in making that is its own."""
        result, error = None, output.error
        if error is None:
            try:
                slot.count(output.record)
                result = slot.result() if slot.sequence.stop_reason is not None else None
            except Exception as found:
                error = found
        if isinstance(error, NonFiniteLogitsError):
            slot.clear()
        slot.leaves_text = error is None
        output.ticket, output.result, output.error = slot.ticket, result, error
        return output


class _Locked:
    """Holds the locks of texts' policies."""

    __slots__ = ("_held", "_locks")

    def __init__(self, slots: list[BatchSlot]) -> None:
        self._locks = [slot.at_work for slot in slots]

    def __enter__(self) -> None:
        self._held = ExitStack()
        try:
            for lock in self._locks:
                self._held.enter_context(lock)
        except BaseException:
            self._held.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._held.close()


class BatchSlot:
    """A text in the engine, with what it holds on to, and what its result will say."""

    def __init__(self, ticket: int, checked: BoundRequest, policies: SharedPolicies, texts: int) -> None:
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
                bound.runners.lend(
                    request.prompt.numel() + request.stops.max_new_tokens,
                    request.prompt,
                    request.owner,
                    alone=texts == 1,
                )
            )
            agree_on_call(bound.model, request, checked.policy)
            policy, self.at_work = self._held.enter_context(policies.use(checked.policy))
            self._captured = self._place.captured  # None where it cannot run from captures
            self._is_away = False  # from its captures, because it shares a batch
            self._ran_eagerly = self._captured is None
            with engine_mode(bound.model.device), self.at_work:
                policy.expect_batch_size(texts)
                self.sequence = Sequence(
                    bound.model, self._place.cache, request, policy, self._place.kept, bound.runners.kind
                )
            self._place.share(self.sequence.prompt_read)
            observes = self.sequence.observes
            if observes.context_layers or observes.features or observes.copies == "needed":
                self._captured, self._ran_eagerly = None, True  # captures do none of this
            self._captures = 0, 0.0
            if self._captured is not None:
                self._captures = self._captured.num_captures, self._captured.capture_seconds
                self._captured.begin()
            self.leaves_text = True
        except BaseException:
            self.close()
            raise

    @property
    def cache_bytes(self) -> int:
        return self._place.cache.num_bytes

    def leave_captures(self, for_good: bool = False) -> None:
        """The coming rounds of this text run eagerly."""
        if self._captured is not None and not self._is_away:
            self._captured.begin()
            self._is_away = self._ran_eagerly = True
        if for_good:
            self._captured = None

    def captures(self) -> CudaGraphRunner | None:
        """What the text can run from now that it is alone, None if that is nothing."""
        if self._captured is not None and self._is_away:
            if self.checked.bound.runners.kind == "eager":  # given up in the meantime
                self._captured = None
                return None
            self._captured.clear(self.sequence.length - 1)  # eager rounds may have left NaN there
            self._is_away = False
        return self._captured

    def count(self, record: RoundRecord | None) -> None:
        """A round, or the prompt's end, was committed."""
        if not self._first_token_seconds:
            self._first_token_seconds = perf_counter() - self.checked.started
        if record is not None and self.checked.keep_trace:
            settled = settle(record)
            if not self._records or self._records[-1].index < record.index:  # not again, if it broke off here
                self._records.append(settled)

    def clear(self) -> None:
        """The text broke off on NaN."""
        if self._place.captured is not None:
            self._place.captured.clear(0)

    def close(self) -> None:
        """Give everything back."""
        if self._closed:
            return
        try:
            if self.leaves_text and self.checked.bound.runners.reuses:
                self._place.leave(self.sequence.tokens[0, : self.sequence.settled], self.sequence.states.kept)
        finally:
            self.leaves_text = False  # the place may be another text's when an interrupted close is repeated
            self._held.close()
            self._closed = True
        self.checked.ended(perf_counter() - self.checked.started)

    def result(self) -> GenerationResult:
        """The result of a complete sequence."""
        checked, text = self.checked, self.sequence
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
            kind = "eager" if self._ran_eagerly else "captured"
        stats = text.stats.finish(
            num_prompt_tokens=num_prompt,
            num_new_tokens=text.num_new,
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
