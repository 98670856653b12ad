"""One sequence: its state, and how a round changes it. It shares nothing with another, so passes need no padding."""

from __future__ import annotations

from functools import partial
from time import get_clock_info, perf_counter, thread_time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.choices import Detail
from layerskip_models.draft_vocabulary import TextVocabulary
from layerskip_models.draft_weights import make_offered
from layerskip_models.kernels.native_linear import MAX_ROWS as PASS_ROWS
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import MAX_ROWS, PromptPiece, piece_end, prefill
from layerskip_models.transfer import to_device
from policies import Drafter, Policy, PolicyCost, RoundContext, RoundRecord, Shadow
from policies.bounds import check_draft_layer, check_loop
from selfspec.cache.copy_index import CopyIndex, copies_drafts
from selfspec.cache.hidden_states import HiddenStates, PrefixHiddenStates
from selfspec.engine.draft import Draft
from selfspec.engine.request import Request
from selfspec.engine.results import StatsBuilder
from selfspec.engine.sampling import Sampler
from selfspec.engine.stopping import StopReason

if TYPE_CHECKING:
    from selfspec.engine.wave import Row

_WATCHED_ROWS = 128
"""Rows of a prompt that are read at a time where somebody watches: whoever looks at logits takes as long as the pass."""
_CPU_CLOCK = thread_time if get_clock_info("thread_time").resolution < 1e-6 else perf_counter
"""By what rounds on a CPU are timed: policies decide by their seconds, in which other programs have no part."""


class Sequence:
    """A sequence from its prompt to its stop.

    cache: with room for the prompt and all new tokens. It is empty, or holds the rows of a prefix of the prompt that an
    earlier sequence has left. kept_states: the hidden states of those rows. policy: of this sequence alone while it lasts.

    tokens: int64 [1, capacity], the text; drafts are written after its `length` committed tokens. pending: the last of
    these, which no layer has seen yet. samples: tokens are drawn. greedy: they are the model's own choices, so nobody needs
    logits. detail: what a draft step computes of a row for the policy. hidden: [rows, hidden], what the layers passed so far
    put out for a round's rows. q: float32 [rows, vocab], the distributions that drafts are drawn from. flight: rows that a
    wave has in flight between two rounds, that of the pending token first.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        cache: KVCache,
        request: Request,
        policy: Policy,
        kept_states: PrefixHiddenStates | None = None,
    ) -> None:
        self.model, self.cache, self.request, self.policy = model, cache, request, policy
        policy.begin_text()
        request.stops.start()
        self.observes = policy.observes
        self.detail: Detail = "confidence" if self.observes.confidence else "token"
        if self.observes.entropy or self.observes.features:
            self.detail = "all"
        rewinds, native = not request.shares_generator, model.kernels is not None
        self.sampler = Sampler(request.processors, request.generator, rewinds=rewinds, native=native)
        self.samples = self.sampler.do_sample
        self.greedy = not self.samples and not request.processors
        self._num_prompt = self.length = request.prompt.numel()  # committed tokens, n
        self.tokens = torch.empty(1, cache.max_length + 1, dtype=torch.long, device=model.device)
        self.tokens[0, : self.length] = request.prompt
        # The same text in the host's memory, for stopping criteria: on CUDA each look at `tokens` would wait for the device.
        self._on_host = None
        if request.stops.criteria:
            self._on_host = torch.empty(1, cache.max_length + 1, dtype=torch.long, device="cpu")
            self._on_host[0, : self.length] = request.prompt
        # Where the host writes, through NumPy: an operator takes as long as the rest of a commit.
        kept = self.tokens, self._on_host
        self._written = [tokens[0].numpy() for tokens in kept if tokens is not None and tokens.is_cpu]
        self.hidden = torch.empty(0, model.hidden_size, dtype=model.dtype, device=model.device)
        self.q = torch.empty(0, model.vocab_size, dtype=torch.float32, device=model.device)
        self.vocabulary: TextVocabulary | None = None  # that drafts choose among; None for all tokens
        if model.draft_vocabulary is not None:
            ends = [token for token in request.stops.eos if 0 <= token < model.vocab_size]
            self.vocabulary = TextVocabulary(model.draft_vocabulary, ends)
        self._steering = model.steering
        self._steered: Tensor | None = None  # by the last row that was verified, once the prompt is read
        self.states = HiddenStates(
            model,
            self.observes.shadow_layers,
            self.observes.context_layers,
            max_length=cache.max_length if self.observes.context_layers else 0,
            kept_layers=() if self._steering is None else self._steering.layers,
        )
        self._prompt_rows = self.observes.prompt_rows_for(self.length, request.stops.max_new_tokens)
        self.states.reserve(self._prompt_rows)
        # Roll back to the rows that need not be read: all but the last, and those that the policy learns from.
        rows = min(cache.length, self.length - max(self._prompt_rows, 1))
        if request.watch_prompt is not None or not self.states.adopt(kept_states, rows):
            rows = 0
        cache.roll_back(rows)
        self.num_reused = rows
        self._copying = copies_drafts(self.observes)
        self.copies: CopyIndex | None = None  # from the first round on
        self._copies_seen: list[tuple[int, bool]] = []  # of tokens before the round at hand: see `RoundRecord`
        self._indexed = -1  # committed tokens that the index holds; -1 at first, and while it is being changed
        self._rest = 0  # rounds in which nobody asks it: see `Plan`
        self.pending = -1
        self.flight: list[Row] = []
        self._rows_shown = 0  # of the prompt, to who watches it
        self._to_learn: Tensor | None = (
            None  # [rows, hidden], of the prompt's last rows, until the policy has seen them
        )
        # Committed tokens that nobody was told of: between rounds none, unless one broke off.
        self.unsent: list[int] = []
        self._is_open = False  # whether a round has begun and not ended
        self._random: tuple[int, Tensor] | None = None  # the length and the generator's state as a round began
        self.stop_reason: StopReason | None = None
        self.stats = StatsBuilder()
        self.clock = _CPU_CLOCK if model.device.type == "cpu" else perf_counter
        self.prefill_seconds = 0.0
        self._rows_learned = self._rows_seen = 0  # of rounds

    @property
    def num_new(self) -> int:
        """Committed tokens that were generated."""
        return self.length - self._num_prompt

    @property
    def num_cached(self) -> int:
        """Rows of the cache that belong to committed tokens, even if a round broke off."""
        return min(self.length - 1, self.cache.length)

    @property
    def reading(self) -> bool:
        """Return whether the first new token is still to come."""
        return self.num_new == 0

    def prompt_read(self) -> Tensor:
        """Return the tokens of the prompt whose rows the cache holds, int64 [rows] on the CPU. Any thread may ask."""
        return self.request.prompt[: self.cache.length]

    def reserve(self, rows: int) -> None:
        """Make room for a round of so many rows. Buffers only ever grow, so that rounds allocate no large tensor."""
        model = self.model
        if self.hidden.shape[0] < rows:
            self.hidden = torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device)
        if rows > 1 and self.samples and self.q.shape[0] < rows:
            self.q = torch.empty(rows, model.vocab_size, dtype=torch.float32, device=model.device)

    def next_piece(self, most: int = MAX_ROWS) -> PromptPiece:
        """Choose what to read next of the prompt, about `most` rows at most."""
        # If this piece or the first token broke off before: to rows that all layers hold, before those that are learned from.
        self.cache.roll_back(min(self.cache.length, self.length - max(self._prompt_rows, 1)))
        capture, last_rows = None, max(self._prompt_rows, int(self._steering is not None))
        if last_rows or self.observes.context_layers:
            capture = partial(self.states.capture_prompt, last_rows)
        rows = (self.length - self.cache.length - last_rows) // PASS_ROWS * PASS_ROWS
        if capture and rows > 0 and self.model.kernels is not None and not self.observes.context_layers:
            capture, most = None, min(most, rows)  # nobody looks at these rows: no layer's output is kept
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
        self._to_learn = hidden[-self._prompt_rows :].clone() if self._prompt_rows else None
        self._is_open = False

    def _learn_from_prompt(self) -> None:
        """Show the policy the prompt's last rows. Not before the first token is out, for it may take as long as reading."""
        hidden, self._to_learn = self._to_learn, None
        if hidden is None:
            return
        logits, steering, overlap = self.model.logits(hidden), self._steering, None
        target = logits.argmax(dim=-1)
        if self.samples:
            sampler, first = self.sampler.without_text(), self._num_prompt - self._prompt_rows + 1
            p = sampler.probabilities(logits, self.tokens, first)
            overlap = partial(sampler.overlap, tokens=self.tokens, length=first, p=p)
        before = None if steering is None else steering.rows_before(self.states.round[:, : self._prompt_rows])
        at_exit = partial(self.model.at_exit, steering=before)
        self.policy.observe_prompt(self.states.shadow_tokens(self._prompt_rows, target, overlap, at_exit))

    def _open(self) -> None:
        """Begin a round from the committed text, whatever an interrupted round has left.

        What it drew is drawn again, unless from the caller's own generator, which others may have drawn from since.
        """
        if self._is_open:
            if not self.reading:
                self.cache.roll_back(min(self.cache.length, self.length - 1))
                if self.cache.length < self.length - 1:
                    prefill(self.model, self.tokens[0, : self.length - 1], self.cache)
            if self._random is not None and self._random[0] == self.length:
                self.sampler.rewind(self._random[1])
        self._is_open = True
        state = self.sampler.state() if self.samples else None
        self._random = None if state is None else (self.length, state)

    def plan(self, batch_size: int) -> Draft:
        """Step 1: ask the policy what it wants of the coming round, in which `batch_size` sequences share the passes."""
        self._open()
        learning = perf_counter()
        self._learn_from_prompt()
        self.stats.learn_seconds += perf_counter() - learning
        planning = self.clock()
        self._rest, self._copies_seen = max(self._rest - 1, 0), []
        if self._copying and not self._rest:
            self._look_back()
        remaining = self.request.stops.max_new_tokens - self.num_new
        match = None if self.copies is None or self._rest else self.copies.match
        context = RoundContext(
            round_index=self.stats.rounds,
            num_committed=self.length,
            remaining_tokens=remaining,
            batch_size=batch_size,
            match_length=0 if match is None else match.length,
        )
        plan = self.policy.exit.plan(context)
        if plan.bits is not None and plan.bits not in self.model.drafters:
            making, begun = perf_counter(), self.clock()
            make_offered(self.model, plan.bits)
            self.stats.setup_seconds += perf_counter() - making
            planning += self.clock() - begun
        if plan.copied and plan.exit_layer is not None:
            raise ValueError(
                f"a plan copies or drafts: with copied={plan.copied}, exit_layer must be None, got {plan.exit_layer}"
            )
        copied: list[int] = []
        if plan.copied and match is not None and self.copies is not None:
            copied = self.copies.continuation(min(plan.copied, remaining - 1))
            for index, token in enumerate(copied):
                if token in self.request.stops.eos:  # after which nothing would be committed
                    copied = copied[: index + 1]
                    break
        cap, threshold = min(plan.max_speculations, remaining - 1), None
        if plan.wave:
            draft = self._wave(plan.wave)
        elif plan.exit_layer is None or cap < 1:
            draft = Draft(self, copied=copied)
        else:
            exit_layer = check_draft_layer(plan.exit_layer, self.model.num_layers, plan.bits)
            if self.policy.stopping is not None:
                self.policy.stopping.start_round(plan)
                threshold = self.policy.stopping.threshold(Drafter(exit_layer, plan.bits))
            draft = Draft(self, exit_layer, cap, plan.bits, copied)
        draft.context, draft.acceptance, draft.threshold = context, plan.acceptance, threshold
        if self.flight and not plan.wave:  # other rounds begin where all loops hold the same rows
            self.cache.roll_back(self.length - 1)
        draft.vocabulary = self._read_vocabulary() if draft.exit_layer else None
        self._rest = self._rest or plan.rest
        # Rounds that copy or wave teach nothing about exits.
        draft.learns = (
            plan.learn and not (copied or plan.wave) and self.observes.learns(self._rows_learned, self._rows_seen)
        )
        if draft.learns or self.observes.context_layers or self._steering is not None:
            self.states.reserve(draft.end + draft.max_speculations)
            draft.states, draft.steering = self.states, self._steered
        draft.plan_seconds = self.clock() - planning  # what was learned may be worked out only now
        return draft

    def _wave(self, loop: int) -> Draft:
        """Make the part in a round of a text that is decoded along the diagonal. loop: after which drafts are chosen."""
        check_loop(loop, self.model.num_loops)
        if self.observes.context_layers:
            raise ValueError("a wave keeps no hidden states: plan none beside a policy that observes context_layers")
        draft = Draft(self)
        draft.wave, draft.flight = loop, [*self.flight]
        return draft

    def _read_vocabulary(self) -> TextVocabulary | None:
        """Let the text's own tokens be drafted. Returns what its drafts choose among."""
        found = self.vocabulary
        if found is None:
            return None
        for end in (self._num_prompt, self.length):
            if found.num_read < end:
                tokens = self.tokens[0, found.num_read : end].tolist()
                found.read(tokens, written=end > self._num_prompt)
        return found if found.pays else None

    def commit(self, draft: Draft) -> list[int] | None:
        """Step 5: commit what was accepted, up to the first stop in it, and forget the rest. Returns what was committed.

        None, and nothing is committed, if the text gets as far as the last token and that has failed.
        """
        start = perf_counter()
        committed = self._commit(draft.block, draft.failure is not None, draft.flight if draft.wave else None)
        self.stats.accept_seconds += perf_counter() - start
        return committed

    def learn(self, draft: Draft, committed: list[int], shares: tuple[float, ...]) -> RoundRecord:
        """Step 6: make the round's record, count it, and let the policy learn from it.

        shares: this text's of the seconds of drafting, verifying and accepting.
        """
        learning = perf_counter()
        speculative, drafts = draft.exit_layer > 0, tuple(draft.tokens)
        drafting = speculative or draft.num_copied > 0
        if not drafting:
            self.stats.learn_seconds += draft.plan_seconds
        spent = self.policy.stopping.spent() if speculative and self.policy.stopping is not None else PolicyCost()
        record = RoundRecord(
            index=draft.context.round_index,
            num_committed_before=draft.context.num_committed,
            exit_layer=draft.exit_layer or None,
            max_speculations=draft.max_speculations,
            draft_tokens=drafts,
            num_accepted=draft.num_accepted,
            tokens=tuple(committed),
            loaded_layers=draft.sweeps * self.model.loop_layers
            or len(drafts) * draft.exit_layer + self.model.num_layers,
            stop_cause=draft.stop_cause,
            confidences=draft.confidences,
            acceptance_probabilities=draft.rates,
            dropped_acceptance=draft.dropped_acceptance,
            shadow=self._shadow_tokens(draft),
            rejected=self._shadow_tokens(draft, rejected=True) if self.observes.rejected_rows else None,
            acceptance=draft.acceptance,
            threshold=draft.threshold,
            draft_seconds=draft.plan_seconds + shares[0] - spent.seconds if drafting else 0.0,
            verify_seconds=shares[1],
            accept_seconds=shares[2],
            preverifier_layers=spent.layers,
            preverify_seconds=spent.seconds,
            batch_size=draft.context.batch_size,
            num_copied=draft.num_copied,
            copies=tuple(self._copies_seen),
            bits=draft.bits,
            sweeps=draft.sweeps,
        )
        self.stats.add(record)
        self._rows_seen += record.num_accepted + 1
        self._rows_learned += 0 if record.shadow is None else record.num_accepted + 1
        self.policy.observe(record)
        self.stats.learn_seconds += perf_counter() - learning
        self._is_open = False
        return record

    def _shadow_tokens(self, draft: Draft, *, rejected: bool = False) -> Shadow | None:
        """Find what the candidate layers would have said for rows 0..m, or for rejected ones, if the policy learns."""
        if not draft.learns or draft.failure is not None:
            return None
        first, overlap = draft.num_accepted + 1, None
        rows = slice(first, None) if rejected else slice(0, first)
        if rejected or draft.p is None:
            chosen = torch.tensor(draft.target_tokens[rows], dtype=torch.long, device="cpu")
            target = to_device(chosen, self.tokens.device)
        else:
            p = draft.p[rows]
            target = p.argmax(dim=-1)
            overlap = partial(self.sampler.overlap, tokens=self.tokens, length=draft.context.num_committed, p=p)
        at_exit = partial(self.model.at_exit, steering=draft.steering)
        shadow = self.states.shadow_tokens(len(target), target, overlap, at_exit, first=rows.start)
        return shadow if len(target) else None

    def _commit(self, block: list[int], failed: bool = False, flight: list[Row] | None = None) -> list[int] | None:
        """Write the block behind the text, find the first stop in it, and move the text's end there.

        What lies behind the end is no part of the text, and is written over. failed: the last entry of the block is not a
        token. flight: the rows in flight behind the block, None where the round was no wave. All that may fail or be
        interrupted comes before the text's length changes, or can be done again by `_open`.
        """
        end = self.length + len(block)
        for written in self._written:
            written[self.length : end] = block
        if not self.tokens.is_cpu:
            # From pinned memory: from ordinary memory a copy to CUDA would wait for all that was launched ahead.
            found = torch.tensor(block, dtype=torch.long, device="cpu", pin_memory=self.tokens.is_cuda)
            self.tokens[0, self.length : end].copy_(found, non_blocking=True)
        real = block[:-1] if failed else block
        count, reason = self.request.stops.first_stop(real, self._on_host, self.length, self.num_new)
        if failed and reason is None:
            return None
        committed = block[:count]
        if self.observes.context_layers and not self.reading:
            self.states.commit(self.length - 1, count)
        pending, steered = block[count - 1], self._steered
        if self._steering is not None and flight is None:  # the row whose output the pending token is
            row = max(self._prompt_rows, 1) - 1 if self.reading else count - 1
            steered = self._steering(self.states.round[[layer - 1 for layer in self._steering.layers], row])
        flight = [] if flight is None or reason is not None else flight
        # Between these lines nothing is called, so no signal is handled: a text has all of a block or nothing of it.
        self.unsent = [*self.unsent, *committed]
        self.pending, self.stop_reason, self._steered = pending, reason, steered
        self.length += count
        self.flight = flight
        if not flight:
            self.cache.roll_back(self.length - 1)
        return committed

    def _look_back(self) -> None:
        """Take what was committed since the last time into the index, and write down what it would have said of it."""
        first, self._indexed = self._indexed, -1
        if self.copies is None or first < 0:  # at first, and after a round that broke off here
            self.copies, first = CopyIndex(self.request.copy_from), self._num_prompt
            self.copies.read(self.request.prompt)
        for token in self.tokens[0, first : self.length].tolist():
            match = self.copies.match
            if match is not None:
                self._copies_seen.append((match.length, match.token == token))
            self.copies.append(token)
        self._indexed = self.length
