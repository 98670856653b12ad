"""One call's rounds: prefill, then plan, draft, verify, accept, roll back, learn, until the text ends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import perf_counter

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.kernels.threads import settle
from policies import Plan, Policy, RoundContext, RoundRecord, Shadow, Spent, check_exit_layer
from selfspec.exit_history import ExitHistory
from selfspec.kv_cache import KVCache
from selfspec.passes import CaptureError, EagerRunner, Outcome, Runner, Turn, argmax_tokens, both
from selfspec.request import Request
from selfspec.sampling import Sampler
from selfspec.shadow import ShadowRecorder
from selfspec.stats import StatsBuilder
from selfspec.stop_conditions import StopReason

_PREFILL_CHUNK = 1024  # rows per prefill pass, so that a long prompt's activations stay small
_MASK_ELEMENTS = 4 << 20  # and rows * positions of the pass's attention mask: 16 MB in float32
_FEWEST_ROWS = 128


def _prefill_starts(length: int) -> list[int]:
    """Where the passes over a prompt of so many tokens begin: shorter ones far into a long text, whose masks are wide."""
    starts = [0]
    while True:
        end = starts[-1] + _PREFILL_CHUNK
        rows = _PREFILL_CHUNK if len(starts) == 1 else min(_PREFILL_CHUNK, max(_FEWEST_ROWS, _MASK_ELEMENTS // end))
        if starts[-1] + rows >= length:
            return starts
        starts.append(starts[-1] + rows)


class Decoding:
    """The state of one call: the cache, the committed tokens, the policy. `run` yields what each round commits.

    runner: of that cache; None for an eager one.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        cache: KVCache,
        request: Request,
        policy: Policy,
        runner: Runner | None = None,
    ) -> None:
        self.model, self.cache, self.request, self.policy = model, cache, request, policy
        policy.begin_text()
        self.needs = policy.needs
        self.history: ExitHistory | None = None
        if self.needs.context_layers:
            self.history = ExitHistory(model, self.needs.context_layers, cache.max_length)
        if self.history is not None or self.needs.features:
            runner = None  # captures keep neither
        self.runner = runner or EagerRunner(model, cache)
        assert self.runner.cache is cache
        self.runner.begin()
        self.on_cuda = model.device.type == "cuda"
        self.sampler = Sampler(request.processors, request.generator)
        self.length = request.prompt.numel()  # committed tokens, n
        self.tokens = torch.empty(1, cache.max_length + 1, dtype=torch.long, device=model.device)
        self.tokens[0, : self.length] = request.prompt
        # The same text in the host's memory, for stopping criteria: on CUDA each look at `tokens` would wait for the device.
        self.text = None
        if request.stops.criteria:
            self.text = torch.empty(1, cache.max_length + 1, dtype=torch.long, device="cpu")
            self.text[0, : self.length] = request.prompt
        self.capture_error: CaptureError | None = None  # why the captured runner was given up
        self.pending = -1  # the last committed token, not yet run through any layer
        self.num_new = 0
        self.stop_reason: StopReason | None = None
        self.stats = StatsBuilder()
        self.prefill_seconds = 0.0
        self.rows_learned = self.rows_seen = 0  # of rounds

    def run(self) -> Iterator[tuple[list[int], RoundRecord | None]]:
        """Yield (committed tokens, record) for the prefill (record None) and for every round, until the text ends."""
        with self.model.on_one_team():
            first = self._prefill()
        yield first, None
        while self.stop_reason is None:
            with self.model.on_one_team():  # left while whoever reads the tokens is at work
                committed = self._round()
            yield committed
        settle()

    def _prefill(self) -> list[int]:
        """Run the prompt through all layers and commit the first new token from the last position's logits."""
        start = perf_counter()
        model, prompt = self.model, self.tokens[0, : self.length]
        recorder = None
        learned = self.needs.prompt_rows_for(self.length, self.request.stops.max_new_tokens)
        if learned:
            recorder = ShadowRecorder(model, self.needs.shadow_layers, learned)
        hidden = prompt.new_empty(0)
        starts = _prefill_starts(self.length)
        if recorder is not None and starts[-1] > self.length - learned:
            first_learned = self.length - learned  # from here on, all in the last pass
            starts = [*(first for first in starts if first < first_learned), first_learned]
        for first, last in zip(starts, [*starts[1:], self.length]):
            learn = recorder.capture_last if recorder is not None and last == self.length else None
            watch = learn if self.history is None else both(learn, partial(self.history.recording(first), 0))
            hidden = model.run_layers(model.embed(prompt[first:last]), 0, model.num_layers, self.cache, first, watch)
        self.cache.roll_back(self.length)
        logits = model.logits(hidden[-1:])
        if self.sampler.do_sample:
            token = self.sampler.draw(
                self.sampler.probabilities(logits, self.tokens, self.length)[0], "the first token"
            )
        else:
            token = argmax_tokens(self.sampler.process(logits, self.tokens, self.length), self.length)[0]
        self._commit([token])
        self.prefill_seconds = perf_counter() - start
        if recorder is not None:
            target = model.logits(hidden[-learned:]).argmax(dim=-1)
            self.policy.observe_prompt(recorder.shadow_tokens(learned, target))
            self.stats.learn_seconds += perf_counter() - start - self.prefill_seconds
        return [token]

    def _round(self) -> tuple[list[int], RoundRecord]:
        """One round: plan, draft, verify, accept, roll back, learn."""
        remaining = self.request.stops.max_new_tokens - self.num_new
        context = RoundContext(round_index=self.stats.rounds, num_committed=self.length, remaining_tokens=remaining)
        planning = perf_counter()
        plan = self.policy.exit.plan(context)
        cap = min(plan.max_speculations, remaining - 1)
        if plan.exit_layer is None or cap < 1:
            return self._autoregressive_step(plan, remaining)
        exit_layer = check_exit_layer(plan.exit_layer, self.model.num_layers)
        if self.policy.stopping is not None:
            self.policy.stopping.start_round(plan)
        threshold = None if self.policy.stopping is None else self.policy.stopping.threshold(exit_layer)
        recorder = self._recorder_for(cap + 1)

        started = perf_counter()
        self.stats.learn_seconds += started - planning  # what was learned may be worked out only now
        outcome = self._run(self._turn(remaining, recorder, exit_layer, cap), plan)
        spent = Spent() if self.policy.stopping is None else self.policy.stopping.spent()
        committed = self._commit(outcome.block, outcome.failure)
        self.stats.accept_seconds += perf_counter() - outcome.verified
        self.stats.num_discarded_rows += outcome.num_discarded
        with self.runner.learning():
            learning = perf_counter()
            record = RoundRecord(
                index=context.round_index,
                num_committed_before=context.num_committed,
                exit_layer=exit_layer,
                max_speculations=cap,
                draft_tokens=outcome.draft_tokens,
                num_accepted=outcome.num_accepted,
                tokens=tuple(committed),
                loaded_layers=len(outcome.draft_tokens) * exit_layer + self.model.num_layers,
                stop_cause=outcome.stop_cause,
                confidences=outcome.confidences,
                acceptance_probabilities=outcome.acceptance_probabilities,
                dropped_acceptance=outcome.dropped_acceptance,
                shadow=self._shadow_tokens(recorder, outcome),
                acceptance=plan.acceptance,
                threshold=threshold,
                draft_seconds=outcome.drafted - started - spent.seconds,
                verify_seconds=outcome.verified - outcome.drafted,
                preverifier_layers=spent.layers,
                preverify_seconds=spent.seconds,
            )
            return self._finish(record, committed, learning)

    def _autoregressive_step(self, plan: Plan, remaining: int) -> tuple[list[int], RoundRecord]:
        """A round without speculation: the pending token through all layers."""
        started = perf_counter()
        num_before = self.length
        recorder = self._recorder_for(1)
        outcome = self._run(self._turn(remaining, recorder, None, 0), plan)
        block = self._commit(outcome.block, outcome.failure)
        self.stats.accept_seconds += perf_counter() - outcome.verified
        with self.runner.learning():
            learning = perf_counter()
            record = RoundRecord(
                index=self.stats.rounds,
                num_committed_before=num_before,
                exit_layer=None,
                max_speculations=0,
                draft_tokens=(),
                num_accepted=0,
                tokens=tuple(block),
                loaded_layers=self.model.num_layers,
                stop_cause=outcome.stop_cause,
                shadow=self._shadow_tokens(recorder, outcome),
                acceptance=plan.acceptance,
                verify_seconds=outcome.verified - started,
            )
            return self._finish(record, block, learning)

    def _run(self, turn: Turn, plan: Plan) -> Outcome:
        """Run a round. If graphs fail, this round and all later ones of the call are run eagerly."""
        try:
            return self.runner.run(turn)
        except CaptureError as error:
            self.capture_error = error
        self.runner = EagerRunner(self.model, self.cache)
        # Graphs may have written anywhere in the cache: the rows of all tokens but the pending one are computed again.
        starts, end = _prefill_starts(self.length - 1), self.length - 1
        for first, last in zip(starts, [*starts[1:], end]):
            hidden = self.model.embed(self.tokens[0, first:last])
            self.model.run_layers(hidden, 0, self.model.num_layers, self.cache, first)
        if turn.exit_layer is not None and self.policy.stopping is not None:
            self.policy.stopping.start_round(plan)  # it may have been asked about rows of this round already
        return self.runner.run(turn)

    def _turn(self, remaining: int, recorder: ShadowRecorder | None, exit_layer: int | None, cap: int) -> Turn:
        return Turn(
            tokens=self.tokens,
            length=self.length,
            pending=self.pending,
            remaining=remaining,
            exit_layer=exit_layer,
            max_speculations=cap,
            sampler=self.sampler,
            policy=self.policy,
            needs=self.needs,
            eos=self.request.stops.eos,
            recorder=recorder,
            history=self.history,
            learns_next=self.needs.learns(self.rows_learned + (recorder is not None), self.rows_seen + 1),
        )

    def _shadow_tokens(self, recorder: ShadowRecorder | None, outcome: Outcome) -> Shadow | None:
        """What the candidate layers would have said for the rows 0..m, if the policy learns in this round."""
        if recorder is None or outcome.target_tokens is None or outcome.failure is not None:
            return None
        rows = outcome.num_accepted + 1
        return recorder.shadow_tokens(
            rows, outcome.target_tokens[:rows], None if outcome.p is None else outcome.p[:rows]
        )

    def _finish(self, record: RoundRecord, committed: list[int], learning: float) -> tuple[list[int], RoundRecord]:
        """Count the round and let the policy learn from it."""
        self.stats.add(record)
        self.rows_seen += record.num_accepted + 1
        self.rows_learned += 0 if record.shadow is None else record.num_accepted + 1
        self.policy.observe(record)
        self.stats.learn_seconds += perf_counter() - learning
        return committed, record

    def _recorder_for(self, rows: int) -> ShadowRecorder | None:
        """The recorder of this round, if the policy learns in it, with room for `rows` rows."""
        if not self.needs.learns(self.rows_learned, self.rows_seen):
            return None
        return self.runner.recorder(self.needs.shadow_layers, rows)

    def _commit(self, block: list[int], failure: Exception | None = None) -> list[int]:
        """Commit a block up to the first stop in it, and return that part; sets lengths, pending and the stop reason.

        failure: why the last token is none: raised, unless the text ends before it.
        """
        end = self.length + len(block)
        if self.text is not None:
            self.text[0, self.length : end] = torch.tensor(block, dtype=torch.long, device="cpu")
        place = self.tokens[0, self.length : end]
        if self.on_cuda:  # from ordinary memory the copy would wait for all that was launched ahead
            place.copy_(torch.tensor(block, dtype=torch.long, device="cpu", pin_memory=True), non_blocking=True)
        else:
            place.copy_(torch.tensor(block, dtype=torch.long, device="cpu"))
        sound = block if failure is None else block[:-1]
        count, self.stop_reason = self.request.stops.first_stop(sound, self.text, self.length, self.num_new)
        if failure is not None:
            if self.stop_reason is None:
                raise failure
            self.runner.clear()  # there may be NaN behind the text
        self.length += count
        self.num_new += count
        self.pending = block[count - 1]
        self.cache.roll_back(self.length - 1)
        return block[:count]
