"""One call's rounds: prefill, then plan, draft, verify, accept, roll back, learn, until the text ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from policies import Plan, Policy, RoundContext, RoundRecord, Spent, check_exit_layer
from selfspec.accept import accept_greedy, accept_sampled, acceptance_probabilities
from selfspec.config import Request
from selfspec.draft import Capture, Drafter
from selfspec.exit_history import ExitHistory
from selfspec.kv_cache import KVCache
from selfspec.sampling import Sampler, non_finite
from selfspec.shadow import ShadowRecorder
from selfspec.stats import StatsBuilder
from selfspec.stop_conditions import StopReason
from selfspec.verify import verify

_PREFILL_CHUNK = 1024  # rows per prefill pass, so that a long prompt's activations stay small


class Decoding:
    """The state of one call: the cache, the committed tokens, the policy. `run` yields what each round commits."""

    def __init__(self, model: LayerSkipModel, cache: KVCache, request: Request, policy: Policy) -> None:
        self.model, self.cache, self.request, self.policy = model, cache, request, policy
        self.drafter = Drafter(model)
        self.needs = policy.needs
        self.sampler = Sampler(request.processors, request.generator)
        self.length = request.prompt.numel()  # committed tokens, n
        self.tokens = torch.empty(1, cache.max_length + 1, dtype=torch.long, device=model.device)
        self.tokens[0, : self.length] = request.prompt
        self.pending = -1  # the last committed token, not yet run through any layer
        self.num_new = 0
        self.stop_reason: StopReason | None = None
        self.stats = StatsBuilder()
        self.prefill_seconds = 0.0
        self.recorder: ShadowRecorder | None = None
        self.history: ExitHistory | None = None
        if self.needs.context_layers:
            self.history = ExitHistory(model, self.needs.context_layers, cache.max_length)

    def run(self) -> Iterator[tuple[list[int], RoundRecord | None]]:
        """Yield (committed tokens, record) for the prefill (record None) and for every round, until the text ends."""
        yield self._prefill(), None
        while self.stop_reason is None:
            yield self._round()

    def _prefill(self) -> list[int]:
        """Run the prompt through all layers and commit the first new token from the last position's logits."""
        start = perf_counter()
        model, prompt = self.model, self.tokens[0, : self.length]
        recorder = None
        if self.needs.shadow_layers and self.needs.prompt_rows:
            recorder = ShadowRecorder(model, self.needs.shadow_layers, min(self.needs.prompt_rows, self.length))
        hidden = prompt.new_empty(0)
        starts = list(range(0, self.length, _PREFILL_CHUNK))
        if recorder is not None and starts[-1] > self.length - recorder.max_rows:
            learned = self.length - recorder.max_rows  # from here on, all in the last pass
            starts = [*(first for first in starts if first < learned), learned]
        for first, last in zip(starts, [*starts[1:], self.length]):
            learn = recorder.capture_last if recorder is not None and last == self.length else None
            watch = learn if self.history is None else _both(learn, partial(self.history.recording(first), 0))
            hidden = model.run_layers(model.embed(prompt[first:last]), 0, model.num_layers, self.cache, first, watch)
        self.cache.roll_back(self.length)
        logits = model.logits(hidden[-1:])
        if self.sampler.do_sample:
            token = self.sampler.draw(
                self.sampler.probabilities(logits, self.tokens, self.length)[0], "the first token"
            )
        else:
            token = self._argmax(self.sampler.process(logits, self.tokens, self.length))[0]
        self._commit([token])
        self.prefill_seconds = perf_counter() - start
        if recorder is not None:
            rows = min(recorder.max_rows, hidden.shape[0])
            target = model.logits(hidden[-rows:]).argmax(dim=-1)
            self.policy.observe_prompt(recorder.shadow_tokens(rows, target))
            self.stats.learn_seconds += perf_counter() - start - self.prefill_seconds
        return [token]

    def _round(self) -> tuple[list[int], RoundRecord]:
        """One round: plan, draft, verify, accept, roll back, learn."""
        remaining = self.request.stops.max_new_tokens - self.num_new
        context = RoundContext(round_index=self.stats.rounds, num_committed=self.length, remaining_tokens=remaining)
        plan = self.policy.exit.plan(context)
        cap = min(plan.max_speculations, remaining - 1)
        if plan.exit_layer is None or cap < 1:
            return self._autoregressive_step(plan)
        exit_layer = check_exit_layer(plan.exit_layer, self.model.num_layers)
        if self.policy.stopping is not None:
            self.policy.stopping.start_round(plan)
        threshold = None if self.policy.stopping is None else self.policy.stopping.threshold(exit_layer)
        recorder = self._recorder_for(cap + 1)
        capture = self._capture(recorder)

        started = perf_counter()
        draft = self.drafter.draft(
            self.tokens,
            self.length,
            self.pending,
            exit_layer=exit_layer,
            max_speculations=cap,
            cache=self.cache,
            sampler=self.sampler,
            policy=self.policy,
            needs=self.needs,
            eos=self.request.stops.eos,
            capture=capture,
            context=self.history,
        )
        drafted = perf_counter()
        spent = Spent() if self.policy.stopping is None else self.policy.stopping.spent()
        logits = verify(self.model, draft, self.length, exit_layer, self.cache, capture)
        verified = perf_counter()

        num_drafts = len(draft.tokens)
        probabilities: tuple[float, ...] | None = None
        p = None
        processed = self.sampler.process(logits, self.tokens, self.length)
        if draft.q is None:
            target = self._argmax(processed)
            accepted = accept_greedy(draft.tokens, target)
            block = target[: accepted + 1]
        else:
            p = processed.softmax(dim=-1)
            drafts = self.tokens[0, self.length : self.length + num_drafts]
            uniforms = self.sampler.uniforms(num_drafts, drafts.device)
            accepted, weights = accept_sampled(p, draft.q, drafts, uniforms)
            block = [
                *draft.tokens[:accepted],
                self.sampler.draw(weights, f"position {self.length + accepted}"),
            ]
            probabilities = tuple(acceptance_probabilities(p, draft.q, drafts).tolist())
        committed = self._commit(block)
        self.stats.accept_seconds += perf_counter() - verified

        learning = perf_counter()
        rows = accepted + 1
        shadow = None
        if recorder is not None:
            # Row i's target token is what the full model says after the row: known for all rows that were verified.
            target_tokens = processed[:rows].argmax(dim=-1)
            shadow = recorder.shadow_tokens(rows, target_tokens, None if p is None else p[:rows])
        record = RoundRecord(
            index=context.round_index,
            num_committed_before=context.num_committed,
            exit_layer=exit_layer,
            max_speculations=cap,
            draft_tokens=tuple(draft.tokens),
            num_accepted=accepted,
            tokens=tuple(committed),
            loaded_layers=num_drafts * exit_layer + self.model.num_layers,
            stop_cause=draft.stop_cause,
            confidences=draft.confidences,
            acceptance_probabilities=probabilities,
            shadow=shadow,
            acceptance=plan.acceptance,
            threshold=threshold,
            draft_seconds=drafted - started - spent.seconds,
            verify_seconds=verified - drafted,
            preverifier_layers=spent.layers,
            preverify_seconds=spent.seconds,
        )
        return self._finish(record, committed, learning)

    def _autoregressive_step(self, plan: Plan) -> tuple[list[int], RoundRecord]:
        """A round without speculation: the pending token through all layers."""
        started = perf_counter()
        num_before = self.length
        recorder = self._recorder_for(1)
        capture = self._capture(recorder)
        watch = None if capture is None else partial(capture, 0)
        hidden = self.model.embed_one(self.pending)
        hidden = self.model.run_layers(hidden, 0, self.model.num_layers, self.cache, self.length - 1, watch)
        logits = self.model.logits(hidden)
        verified = perf_counter()
        p = None
        processed = self.sampler.process(logits, self.tokens, self.length)
        if self.sampler.do_sample:
            p = processed.softmax(dim=-1)
            block = [self.sampler.draw(p[0], f"position {self.length}")]
        else:
            block = self._argmax(processed)
        self._commit(block)
        self.stats.accept_seconds += perf_counter() - verified
        learning = perf_counter()
        shadow = None if recorder is None else recorder.shadow_tokens(1, processed.argmax(dim=-1), p)
        record = RoundRecord(
            index=self.stats.rounds,
            num_committed_before=num_before,
            exit_layer=None,
            max_speculations=0,
            draft_tokens=(),
            num_accepted=0,
            tokens=tuple(block),
            loaded_layers=self.model.num_layers,
            stop_cause="none",
            shadow=shadow,
            acceptance=plan.acceptance,
            verify_seconds=verified - started,
        )
        return self._finish(record, block, learning)

    def _finish(self, record: RoundRecord, committed: list[int], learning: float) -> tuple[list[int], RoundRecord]:
        """Count the round and let the policy learn from it."""
        self.stats.add(record)
        self.policy.observe(record)
        self.stats.learn_seconds += perf_counter() - learning
        return committed, record

    def _recorder_for(self, rows: int) -> ShadowRecorder | None:
        """The recorder of this round, if the policy learns in it, with room for `rows` rows."""
        if not self.needs.learns_in(self.stats.rounds):
            return None
        if self.recorder is None or self.recorder.max_rows < rows:
            self.recorder = ShadowRecorder(self.model, self.needs.shadow_layers, max(rows, 8))
        return self.recorder

    def _capture(self, recorder: ShadowRecorder | None) -> Capture | None:
        """What sees this round's hidden states: the recorder, the history, both or nobody."""
        learn = None if recorder is None else recorder.capture
        return learn if self.history is None else _both(learn, self.history.recording(self.length - 1))

    def _argmax(self, logits: Tensor) -> list[int]:
        """Argmax of each row, [rows, vocab]. Raises NonFiniteLogitsError for NaN or a row that is masked entirely."""
        best = logits.max(dim=-1)
        values, choices = best.values.tolist(), best.indices.tolist()
        for offset, value in enumerate(values):
            if value != value or value in (float("inf"), float("-inf")):
                raise non_finite(f"position {self.length + offset}")
        return choices

    def _commit(self, block: list[int]) -> list[int]:
        """Commit a block up to the first stop in it, and return that part; sets lengths, pending and the stop reason."""
        self.tokens[0, self.length : self.length + len(block)] = torch.tensor(block)
        count, self.stop_reason = self.request.stops.first_stop(block, self.tokens, self.length, self.num_new)
        self.length += count
        self.num_new += count
        self.pending = block[count - 1]
        self.cache.roll_back(self.length - 1)
        return block[:count]


def _both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    """Call both with the same arguments."""
    if first is None:
        return second

    def call(*arguments: object) -> None:
        first(*arguments)
        second(*arguments)

    return call
