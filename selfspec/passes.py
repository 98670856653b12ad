"""How a round's passes are run: one signature, eager here, captured in `selfspec.graphs.captured_runner`.

A runner drafts, verifies and accepts; what is committed, streamed and learned from it is `selfspec.decoding`'s. Eager calls
every operation from Python and reads every token: the fastest way on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.native_linear import only_operators
from layerskip_models.kernels.native_steps import STEP_ROWS, NativeSteps
from policies import Needs, Policy
from policies.records import StopCause
from selfspec.draft import Capture, Draft, Drafter
from selfspec.exit_history import ExitHistory
from selfspec.judge import Verdict, judge_choices, judge_greedy, judge_sampled
from selfspec.kv_cache import KVCache
from selfspec.sampling import Sampler, non_finite
from selfspec.shadow import ShadowRecorder
from selfspec.verify import verify, verify_directly

_WHENEVER = nullcontext()


class CaptureError(RuntimeError):
    """Work could not be captured or replayed, or a replay gave other numbers than the work itself. The message says why.

    An eager runner can go on where this one was.
    """


RunnerName = Literal["eager", "captured"]
RunnerChoice = Literal["auto", "eager", "captured"]


def resolve_runner(runner: str, device: torch.device) -> RunnerName:
    """The runner by name: "auto" is captured on CUDA and eager elsewhere. ValueError with the choices for another name."""
    if runner not in get_args(RunnerChoice):
        raise ValueError(f"runner must be one of {', '.join(get_args(RunnerChoice))}, got {runner!r}")
    if runner == "auto":
        return "captured" if device.type == "cuda" else "eager"
    return "captured" if runner == "captured" else "eager"


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Within it a CUDA device is the current one, whose streams and events are meant where none is named."""
    return torch.cuda.device(device) if device.type == "cuda" else _WHENEVER


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """What a round is to be run on.

    tokens: int64 [1, capacity]; the first `length` are committed, the last of them is `pending`, not yet run; drafts are
    written behind them. remaining: tokens that may still be committed.
    exit_layer, max_speculations: of the plan; None and 0 for a round without speculation.
    eos: ends a draft. recorder: sees every hidden state that a policy wants to learn from, None if it does not now.
    history: keeps the whole text's hidden states at some layers, for a policy that looks back at them, else None.
    learns_next: whether there will be one in the round after this.
    """

    tokens: Tensor
    length: int
    pending: int
    remaining: int
    exit_layer: int | None
    max_speculations: int
    sampler: Sampler
    policy: Policy
    needs: Needs
    eos: frozenset[int]
    recorder: ShadowRecorder | None
    history: ExitHistory | None
    learns_next: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a round yields.

    draft_tokens: the kept drafts d_1..d_k, the first num_accepted (m) of which were accepted. block: m + 1 tokens to commit.
    target_tokens: int64, the full model's choice for rows 0..m at least, None without a recorder; p: the distributions it
        was made from when sampling, else None.
    failure: why the last token of the block is none, else None; to be raised if the text comes to that token.
    dropped_token: what a greedy draft would have taken from the row that a policy stopped before, else None.
    num_discarded: rows run ahead of a decision to drop their token.
    drafted, verified: `perf_counter` when drafting and when verifying had been launched.
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
    drafted: float
    verified: float
    failure: Exception | None = None
    dropped_token: int | None = None
    num_discarded: int = 0

    @property
    def dropped_acceptance(self) -> float | None:
        """See `RoundRecord`: known where every draft before it was accepted."""
        if self.dropped_token is None or self.failure is not None or self.num_accepted < len(self.draft_tokens):
            return None
        return float(self.block[-1] == self.dropped_token)


class Runner(Protocol):
    """Runs rounds on one KV cache. num_captures, capture_seconds: since it was made; 0 for one that captures nothing."""

    cache: KVCache

    @property
    def num_captures(self) -> int:
        """Captures made so far."""
        ...

    @property
    def capture_seconds(self) -> float:
        """Seconds that they took."""
        ...

    def begin(self) -> None:
        """A new text begins: nothing of the one before may be relied on."""
        ...

    def clear(self) -> None:
        """Forget the numbers of a text that broke off because they were none."""
        ...

    def learning(self) -> AbstractContextManager[None]:
        """Within it the last round is learned from."""
        ...

    def recorder(self, layers: tuple[int, ...], max_rows: int) -> ShadowRecorder:
        """A recorder of these layers with room for so many rows."""
        ...

    def run(self, turn: Turn) -> Outcome:
        """Draft, verify and accept; or take one plain step."""
        ...


class EagerRunner:
    """Every operation is called from Python, when its turn comes."""

    num_captures = 0
    capture_seconds = 0.0

    def __init__(self, model: LayerSkipModel, cache: KVCache) -> None:
        self.cache = cache
        self._model = model
        self._drafter = Drafter(model)
        self._recorder: ShadowRecorder | None = None
        self._steps = model.steps(cache)  # for greedy decoding without processors; None where there are none
        self._outputs: Tensor | None = None  # see `_memory_for`
        self._last = torch.empty(model.hidden_size, dtype=model.dtype, device=model.device)

    def begin(self) -> None:
        """Nothing to forget."""

    def clear(self) -> None:
        """Nothing is read before it is written."""

    def learning(self) -> AbstractContextManager[None]:
        """Whenever."""
        return _WHENEVER

    def recorder(self, layers: tuple[int, ...], max_rows: int) -> ShadowRecorder:
        """See `Runner`."""
        recorder = self._recorder
        if recorder is None or recorder.layers != layers or recorder.max_rows < max_rows:
            every = self._steps is not None
            recorder = self._recorder = ShadowRecorder(self._model, layers, max(max_rows, 8), every_layer=every)
        return recorder

    def run(self, turn: Turn) -> Outcome:
        """See `Runner`."""
        return self._step(turn) if turn.exit_layer is None else self._speculate(turn, turn.exit_layer)

    def _speculate(self, turn: Turn, exit_layer: int) -> Outcome:
        sampler = turn.sampler
        capture = _capture(turn)
        steps = self._steps_for(turn) if turn.max_speculations < STEP_ROWS else None
        draft = self._drafter.draft(
            turn.tokens,
            turn.length,
            turn.pending,
            exit_layer=exit_layer,
            max_speculations=turn.max_speculations,
            cache=self.cache,
            sampler=sampler,
            policy=turn.policy,
            needs=turn.needs,
            eos=turn.eos,
            capture=capture,
            context=turn.history,
            steps=steps,
            memory=self._memory_for(turn),
        )
        drafted = perf_counter()
        if draft.q is None and not sampler.processors:
            if steps is not None:
                memory = self._memory_for(turn)
                layers = self._model.num_layers
                chosen, values = verify_directly(steps, layers, draft, turn.length, exit_layer, memory)
                if turn.history is not None and memory is not None:
                    turn.history.take(memory, turn.length - 1, len(draft.tokens) + 1)
            else:
                hidden = verify(self._model, draft, turn.length, exit_layer, self.cache, capture)
                choices = self._model.choices(hidden)
                chosen, values = choices.tokens.tolist(), choices.logits.tolist()
            verified = perf_counter()
            verdict = judge_choices(chosen, values, turn.length, draft.tokens)
            if draft.tokens and verdict.failure is not None:
                return self._step(turn)  # as below
            return self._outcome(turn, draft, verdict, drafted, verified)
        logits = self._model.logits(verify(self._model, draft, turn.length, exit_layer, self.cache, capture))
        verified = perf_counter()
        if draft.q is None:
            verdict = judge_greedy(sampler, logits, turn.tokens, turn.length, draft.tokens)
            if draft.tokens and _holds_nan(verdict, logits):
                # A row that overflows may spoil the rows before it, behind whose mask it is: nobody needs it but the draft.
                return self._step(turn)
        else:
            verdict = judge_sampled(sampler, logits, turn.tokens, turn.length, draft.tokens, draft.q)
        return self._outcome(turn, draft, verdict, drafted, verified)

    def _outcome(self, turn: Turn, draft: Draft, verdict: Verdict, drafted: float, verified: float) -> Outcome:
        return Outcome(
            draft_tokens=tuple(draft.tokens),
            num_accepted=verdict.num_accepted,
            block=verdict.block,
            target_tokens=_targets(turn, verdict),
            p=verdict.p,
            stop_cause=draft.stop_cause,
            confidences=draft.confidences,
            acceptance_probabilities=verdict.acceptance,
            drafted=drafted,
            verified=verified,
            failure=verdict.failure,
            dropped_token=draft.dropped_token,
        )

    def _step(self, turn: Turn) -> Outcome:
        model, sampler, capture = self._model, turn.sampler, _capture(turn)
        started = perf_counter()
        steps = self._steps_for(turn)
        if steps is not None:
            memory = self._memory_for(turn)
            place = None if memory is None else (memory, 0)
            position, last = turn.length - 1, self._last
            look = steps.token(turn.pending, position, model.num_layers, last, head="full", record=place)
            assert look is not None
            if turn.history is not None and memory is not None:
                turn.history.take(memory, position, 1)
            verified = perf_counter()
            verdict = judge_choices([look.token], (look.logit,), turn.length, ())
            outcome = plain_outcome(verdict.block, _targets(turn, verdict), None, started, verified)
            return outcome if verdict.failure is None else replace(outcome, failure=verdict.failure)
        watch = None if capture is None else partial(capture, 0)
        hidden = model.embed_one(turn.pending)
        hidden = model.run_layers(hidden, 0, model.num_layers, self.cache, turn.length - 1, watch)
        logits = model.logits(hidden)
        verified = perf_counter()
        if sampler.do_sample:
            verdict = judge_sampled(sampler, logits, turn.tokens, turn.length, (), logits[:0])
        else:
            verdict = judge_greedy(sampler, logits, turn.tokens, turn.length, ())
        outcome = plain_outcome(verdict.block, _targets(turn, verdict), verdict.p, started, verified)
        return outcome if verdict.failure is None else replace(outcome, failure=verdict.failure)

    def _steps_for(self, turn: Turn) -> NativeSteps | None:
        """What this turn's passes are run with, if nothing has to see what happens in between but layers' outputs."""
        sampler = turn.sampler
        if self._steps is None or sampler.do_sample or sampler.processors or only_operators():
            return None
        return self._steps if turn.recorder is None or turn.recorder.every_layer else None

    def _memory_for(self, turn: Turn) -> Tensor | None:
        """Where steps put every layer's output in this turn, [layers, rows, hidden], if anybody wants to see any."""
        if turn.recorder is not None:
            return turn.recorder.memory
        if turn.history is None:
            return None
        if self._outputs is None:
            shape = self._model.num_layers, STEP_ROWS, self._model.hidden_size
            self._outputs = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        return self._outputs


def _targets(turn: Turn, verdict: Verdict) -> Tensor | None:
    """The full model's choices for the rows 0..m, if somebody learns from them."""
    if turn.recorder is None:
        return None
    if verdict.p is not None:
        return verdict.p.argmax(dim=-1)
    return torch.tensor(verdict.target_tokens, device=turn.tokens.device)


def _holds_nan(verdict: Verdict, logits: Tensor) -> bool:
    """Whether the round failed, and the model's own logits are why."""
    return verdict.failure is not None and bool(logits[verdict.num_accepted].isnan().any())


def _capture(turn: Turn) -> Capture | None:
    """What sees this round's hidden states: the recorder, the history, both or nobody."""
    learn = None if turn.recorder is None else turn.recorder.capture
    return learn if turn.history is None else both(learn, turn.history.recording(turn.length - 1))


def both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    """Call both with the same arguments."""
    if first is None:
        return second

    def call(*arguments: object) -> None:
        first(*arguments)
        second(*arguments)

    return call


def plain_outcome(
    block: list[int], target_tokens: Tensor | None, p: Tensor | None, started: float, verified: float
) -> Outcome:
    """Of a round without speculation."""
    return Outcome(
        draft_tokens=(),
        num_accepted=0,
        block=block,
        target_tokens=target_tokens,
        p=p,
        stop_cause="none",
        confidences=None,
        acceptance_probabilities=None,
        drafted=started,
        verified=verified,
    )


def argmax_tokens(logits: Tensor, position: int) -> list[int]:
    """Argmax of each row, [rows, vocab]. Raises NonFiniteLogitsError for NaN.

    As in transformers, a row in which every token is masked gives token 0, and an infinite logit wins.
    position: in the text, of what the first row predicts.
    """
    best = logits.max(dim=-1)
    for offset, value in enumerate(best.values.tolist()):
        if value != value:
            raise non_finite(f"position {position + offset}")
    return best.indices.tolist()
