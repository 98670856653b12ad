"""One sequence: its state, and how a round changes it.

A sequence shares nothing with another: committed tokens, KV cache, stop conditions, processors, random generator, policy
state and statistics are its own. So sequences that share a pass need no padding and no realignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import MAX_ROWS, PromptPiece, piece_end, prefill
from policies import Drafter, Plan, Policy, PolicyCost, RoundContext, RoundRecord, Shadow
from policies.bounds import check_draft_layer
from selfspec.cache.copy_index import CopyIndex, copies_drafts
from selfspec.engine.draft_choice import make_offered
from selfspec.engine.hidden_states import HiddenStates, PrefixHiddenStates
from selfspec.engine.request import Request
from selfspec.engine.results import RoundResult
from selfspec.engine.runners.choice import RunnerName
from selfspec.engine.runners.runner import Runner, SequenceRound
from selfspec.engine.sampling import Sampler
from selfspec.engine.stats import StatsBuilder
from selfspec.engine.stopping import StopReason

_WATCHED_ROWS = 128
"""Rows of a prompt that are read at a time where somebody watches: whoever looks at logits takes as long as the pass."""


@dataclass(slots=True, kw_only=True, eq=False)
class Planned:
    """A sequence's plan for a round, with what the round's record will say of it."""

    plan: Plan
    seq_round: SequenceRound
    context: RoundContext
    threshold: float | None


class Sequence:
    """A sequence from its prompt to its stop.

    cache: with room for the prompt and all new tokens. It is empty, or holds the rows of a prefix of the prompt that an
    earlier sequence has left. kept_states: the hidden states of those rows. policy: of this sequence alone while it lasts.
    runner: the generator's. A sequence in a batch runs eagerly, but it copies drafts only if this runner would.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        cache: KVCache,
        request: Request,
        policy: Policy,
        kept_states: PrefixHiddenStates | None = None,
        runner: RunnerName = "eager",
    ) -> None:
        self.model, self.cache, self.request, self.policy = model, cache, request, policy
        policy.begin_text()
        request.stops.start()
        self.observes = policy.observes
        self.sampler = Sampler(
            request.processors,
            request.generator,
            rewinds=not request.shares_generator,
            native=model.kernels is not None,
        )
        self._num_prompt = self.length = request.prompt.numel()  # committed tokens, n
        self.tokens = torch.empty(1, cache.max_length + 1, dtype=torch.long, device=model.device)
        self.tokens[0, : self.length] = request.prompt
        # The same text in the host's memory, for stopping criteria: on CUDA each look at `tokens` would wait for the device.
        self._on_host = None
        if request.stops.criteria:
            self._on_host = torch.empty(1, cache.max_length + 1, dtype=torch.long, device="cpu")
            self._on_host[0, : self.length] = request.prompt
        # Where the host writes, through NumPy: an operator takes as long as the rest of a commit.
        kept = [tokens for tokens in (self.tokens, self._on_host) if tokens is not None and tokens.is_cpu]
        self._written = [tokens[0].numpy() for tokens in kept]
        self._steering = model.steering
        self._steered: Tensor | None = None  # by the last row that was verified, once the prompt is read
        steering_layers = () if self._steering is None else self._steering.layers
        self.states = HiddenStates(
            model, self.observes.shadow_layers, self.observes.context_layers,
            max_length=cache.max_length if self.observes.context_layers else 0,
            kept_layers=steering_layers,
        )  # fmt: skip
        self._prompt_rows = self.observes.prompt_rows_for(self.length, request.stops.max_new_tokens)
        self.states.reserve(self._prompt_rows)
        self.num_reused = self._reuse(kept_states)
        self.copies: CopyIndex | None = None
        self._copies_seen: list[tuple[int, bool]] = []  # of the round at hand: see `RoundRecord.copies`
        self._indexed = 0  # committed tokens that the index holds; -1 while it is being changed
        if copies_drafts(self.observes, runner):
            self._index_anew()
        self.pending = -1  # the last committed token, not yet run through any layer
        self._rows_shown = 0  # of the prompt, to who watches it
        self.unsent: list[int] = []
        """Committed tokens that nobody was told of yet: between rounds none, unless one broke off."""
        self._is_open = False  # whether a round has begun and not ended
        self._random: tuple[int, Tensor] | None = None  # the length and the generator's state as a round began
        self.stop_reason: StopReason | None = None
        self.stats = StatsBuilder()
        self.prefill_seconds = 0.0
        self._rows_learned = self._rows_seen = 0  # of rounds

    def _reuse(self, kept: PrefixHiddenStates | None) -> int:
        """Roll back to the rows that need not be read: all but the last, and those that the policy learns from."""
        rows = min(self.cache.length, self.length - max(self._prompt_rows, 1))
        if self.request.watch_prompt is not None or not self.states.adopt(kept, rows):
            rows = 0
        self.cache.roll_back(rows)
        return rows

    @property
    def num_new(self) -> int:
        """Committed tokens that were generated."""
        return self.length - self._num_prompt

    @property
    def num_cached(self) -> int:
        """Rows of the cache that belong to committed tokens, even if a round broke off."""
        return min(self.length - 1, self.cache.length)

    def prompt_read(self) -> Tensor:
        """Return the tokens of the prompt whose rows the cache holds, int64 [rows] on the CPU. Any thread may ask."""
        return self.request.prompt[: self.cache.length]

    @property
    def reading(self) -> bool:
        """Whether part of the prompt is still to be read."""
        return self.num_new == 0

    @property
    def unread(self) -> int:
        """Tokens of the prompt still to be read."""
        return self.length - self.cache.length if self.reading else 0

    def next_piece(self, most: int = MAX_ROWS) -> PromptPiece:
        """Choose what to read next of the prompt, about `most` rows at most."""
        # If this piece or the first token broke off before: to rows that all layers hold, before those that are learned from.
        self.cache.roll_back(min(self.cache.length, self.length - max(self._prompt_rows, 1)))
        capture = None
        if self._prompt_rows or self.observes.context_layers or self._steering is not None:
            last_rows = self._prompt_rows if self._steering is None else max(self._prompt_rows, 1)
            capture = partial(self.states.capture_prompt, last_rows)
        if self.request.watch_prompt is not None:
            self.cache.roll_back(min(self.cache.length, self._rows_shown))
            most = min(most, _WATCHED_ROWS)
        end = piece_end(self.cache.length, self.length, most=most, together=self._prompt_rows)
        return PromptPiece(self.tokens[0, : self.length], self.cache, end, capture)

    def show_prompt(self, hidden: Tensor) -> None:
        """hidden: what the last layer put out for the rows that were just read, [rows, hidden]."""
        if self.request.watch_prompt is not None:
            self.request.watch_prompt(self.cache.length - hidden.shape[0], hidden)
            self._rows_shown = self.cache.length

    def begin(self, hidden: Tensor, logits: Tensor) -> None:
        """Commit the first new token, once the prompt is read.

        hidden: [rows, hidden], of the last piece. logits: [1, vocab], of its last row.
        """
        start = perf_counter()
        self._open()
        token = self.sampler.next_token(logits, self.tokens, self.length)
        self._commit([token])
        self.prefill_seconds += perf_counter() - start
        if self._prompt_rows:
            learning = perf_counter()
            target = self.model.logits(hidden[-self._prompt_rows :]).argmax(dim=-1)
            each = (
                None
                if self._steering is None
                else self._steering.rows_before(self.states.round[:, : self._prompt_rows])
            )
            at_exit = partial(self.model.at_exit, steering=each)
            self.policy.observe_prompt(self.states.shadow_tokens(self._prompt_rows, target, at_exit=at_exit))
            self.stats.learn_seconds += perf_counter() - learning
        self._is_open = False

    def read_again(self) -> None:
        """Compute the cache's rows of all committed tokens but the pending one once more: somebody wrote to it."""
        self.cache.declare(0)
        self._read_rest()

    def _read_rest(self) -> None:
        """Read the committed tokens whose rows the cache lacks, but for the pending one."""
        if self.cache.length < self.length - 1:
            prefill(self.model, self.tokens[0, : self.length - 1], self.cache)

    def _open(self) -> None:
        """Begin a round from the committed text, whatever an interrupted round has left.

        What was drawn in a round that broke off is drawn again, unless the caller's own generator was used, which others may
        have drawn from since.
        """
        if self._is_open:
            if not self.reading:
                self.cache.roll_back(min(self.cache.length, self.length - 1))
                self._read_rest()
            if self.copies is not None and self._indexed != self.length:
                self._index_anew()
            if self._random is not None and self._random[0] == self.length:
                self.sampler.rewind(self._random[1])
        self._is_open = True
        state = self.sampler.state()
        self._random = None if state is None else (self.length, state)

    def plan(self, runner: Runner, batch_size: int) -> Planned:
        """Step 1: what the policy wants of the coming round, in which `batch_size` sequences share the passes."""
        planning = perf_counter()
        self._open()
        remaining = self.request.stops.max_new_tokens - self.num_new
        match = self.copies.match if self.copies is not None and runner.copies else None
        context = RoundContext(
            round_index=self.stats.rounds, num_committed=self.length, remaining_tokens=remaining, batch_size=batch_size,
            match_length=0 if match is None else match.length,
        )  # fmt: skip
        plan = self.policy.exit.plan(context)
        if plan.bits is not None and plan.bits not in self.model.drafters:
            making = perf_counter()
            make_offered(self.model, plan.bits)
            self.stats.setup_seconds += perf_counter() - making
            planning += perf_counter() - making
        if plan.copied and plan.exit_layer is not None:
            raise ValueError(
                f"a plan copies or drafts: with copied={plan.copied}, exit_layer must be None, got {plan.exit_layer}"
            )
        copied = self._copied(min(plan.copied, remaining - 1)) if plan.copied and match is not None else ()
        cap = min(plan.max_speculations, remaining - 1)
        exit_layer = threshold = None
        if plan.exit_layer is None or cap < 1:
            cap = 0
        else:
            exit_layer = check_draft_layer(plan.exit_layer, self.model.num_layers, plan.bits)
            if self.policy.stopping is not None:
                self.policy.stopping.start_round(plan)
                threshold = self.policy.stopping.threshold(Drafter(exit_layer, plan.bits))
        # Rounds that copy teach nothing about exits.
        learns = plan.learn and not copied and self.observes.learns(self._rows_learned, self._rows_seen)
        watches = learns or bool(self.observes.context_layers) or self._steering is not None
        seq_round = SequenceRound(
            cache=self.cache,
            tokens=self.tokens,
            length=self.length,
            pending=self.pending,
            exit_layer=exit_layer,
            max_speculations=cap,
            sampler=self.sampler,
            policy=self.policy,
            observes=self.observes,
            eos=self.request.stops.eos,
            states=runner.states(self.states, len(copied) + cap + 1) if watches else None,
            learns=learns,
            copied=copied,
            bits=None if exit_layer is None else plan.bits,
            steering=self._steered,
        )
        self.stats.learn_seconds += perf_counter() - planning  # what was learned may be worked out only now
        return Planned(plan=plan, seq_round=seq_round, context=context, threshold=threshold)

    def _copied(self, most: int) -> list[int]:
        """Return what may be copied now: up to an EOS, after which nothing would be committed."""
        assert self.copies is not None
        copied = self.copies.continuation(most)
        for index, token in enumerate(copied):
            if token in self.request.stops.eos:
                return copied[: index + 1]
        return copied

    def commit(self, result: RoundResult) -> list[int] | None:
        """Step 5: commit what was accepted, up to the first stop in it, and forget the rest. Returns what was committed.

        None, and nothing is committed, if the text gets as far as the last token and that has failed.
        """
        start = perf_counter()
        committed = self._commit(result.block, result.failure is not None)
        self.stats.num_discarded_rows += result.num_discarded
        self.stats.accept_seconds += perf_counter() - start
        return committed

    def learn(
        self, planned: Planned, result: RoundResult, committed: list[int], draft_seconds: float, verify_seconds: float
    ) -> RoundRecord:
        """Step 6: make the round's record, count it, and let the policy learn from it.

        *_seconds: this text's share of the steps that it shared.
        """
        learning = perf_counter()
        seq_round, plan = planned.seq_round, planned.plan
        speculative = seq_round.exit_layer is not None
        drafting = speculative or bool(seq_round.copied)
        spent = self.policy.stopping.spent() if speculative and self.policy.stopping is not None else PolicyCost()
        num_layers = self.model.num_layers
        record = RoundRecord(
            index=planned.context.round_index,
            num_committed_before=planned.context.num_committed,
            exit_layer=seq_round.exit_layer,
            max_speculations=seq_round.max_speculations,
            draft_tokens=result.draft_tokens,
            num_accepted=result.num_accepted,
            tokens=tuple(committed),
            loaded_layers=len(result.draft_tokens) * (seq_round.exit_layer or 0) + num_layers,
            stop_cause=result.stop_cause,
            confidences=result.confidences,
            acceptance_probabilities=result.acceptance_probabilities,
            dropped_acceptance=result.dropped_acceptance,
            shadow=self._shadow_tokens(seq_round, result),
            acceptance=plan.acceptance,
            threshold=planned.threshold,
            draft_seconds=draft_seconds - spent.seconds if drafting else 0.0,
            verify_seconds=verify_seconds,
            preverifier_layers=spent.layers,
            preverify_seconds=spent.seconds,
            batch_size=planned.context.batch_size,
            num_copied=result.num_copied,
            copies=tuple(self._copies_seen),
            bits=seq_round.bits,
        )
        self.stats.add(record)
        self._rows_seen += record.num_accepted + 1
        self._rows_learned += 0 if record.shadow is None else record.num_accepted + 1
        self.policy.observe(record)
        self.stats.learn_seconds += perf_counter() - learning
        self._is_open = False
        return record

    def _shadow_tokens(self, seq_round: SequenceRound, result: RoundResult) -> Shadow | None:
        """Find what the candidate layers would have said for the rows 0..m, if the policy learns in this round."""
        if (
            not seq_round.learns
            or seq_round.states is None
            or result.target_tokens is None
            or result.failure is not None
        ):
            return None
        rows = result.num_accepted + 1
        p = None if result.p is None else result.p[:rows]
        at_exit = partial(self.model.at_exit, steering=seq_round.steering)
        return seq_round.states.shadow_tokens(rows, result.target_tokens[:rows], p, at_exit)

    def _commit(self, block: list[int], failed: bool = False) -> list[int] | None:
        """Set lengths, pending and the stop reason. failed: the last entry of the block is not a token.

        All that may fail or be interrupted comes before the text's length changes, or can be done again by `_open`.
        """
        end = self.length + len(block)
        for written in self._written:
            written[self.length : end] = block
        if not self.tokens.is_cpu:
            # From pinned memory: from ordinary memory a copy to CUDA would wait for all that was launched ahead.
            found = torch.tensor(block, dtype=torch.long, device="cpu", pin_memory=self.tokens.is_cuda)
            self.tokens[0, self.length : end].copy_(found, non_blocking=True)
        sound = block[:-1] if failed else block
        count, reason = self.request.stops.first_stop(sound, self._on_host, self.length, self.num_new)
        if failed and reason is None:
            return None
        committed = block[:count]
        if not self.reading:
            self.states.commit(self.length - 1, count)
        if self.copies is not None:
            self._indexed = -1
            self._copies_seen = self._index(self.copies, committed)
            self._indexed = self.length + count
        pending, steered = block[count - 1], self._steered
        if self._steering is not None:  # the row whose output the pending token is
            row = max(self._prompt_rows, 1) - 1 if self.reading else count - 1
            steered = self._steering(self.states.at(self._steering.layers, row))
        # Between these lines nothing is called, so no signal is handled: a text has all of a block or nothing of it.
        self.unsent = [*self.unsent, *committed]
        self.pending, self.stop_reason, self._steered = pending, reason, steered
        self.length += count
        self.cache.roll_back(self.length - 1)
        return committed

    def _index(self, copies: CopyIndex, tokens: list[int]) -> list[tuple[int, bool]]:
        """Take committed tokens into the index. Returns what it would have said of each."""
        seen = []
        for token in tokens:
            match = copies.match
            if match is not None:
                seen.append((match.length, match.token == token))
            copies.append(token)
        return seen

    def _index_anew(self) -> None:
        """Make an index of the committed text, which comes to it as it came the first time."""
        self.copies = CopyIndex(self.request.copy_from)
        self.copies.read(self.request.prompt)
        self._index(self.copies, self.tokens[0, self._num_prompt : self.length].tolist())
        self._indexed = self.length
