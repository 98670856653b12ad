"""The captured runner: a round launched as a few graphs, and read when it is there.

The host launches ahead of what it knows. Without a stopping rule a whole draft and its verification are launched before
anything is read. With one, the next row's layers are launched before the row's confidence is read: verification needs them
whether drafting goes on or ends with that token kept; only when the token is dropped were they run for nothing. And while
the host reads a round and commits it, the next round's first pass is running already, at the exit layer of this one.

The order of random numbers is the eager runner's, except that a token which is then dropped has been drawn before the
decision (which does not see it: see `policies.base`), and that drafting runs past an end-of-sequence token, behind which
nothing is counted. What was drawn for such a token is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.kv_cache import KVCache
from selfspec.engine.accept import (
    accept_greedy,
    accept_greedy_on_device,
    accept_sampled_on_device,
    acceptance_probabilities,
)
from selfspec.engine.hidden_states import HiddenStates
from selfspec.engine.results import RoundResult
from selfspec.engine.runners.cuda_graph import first_rounds
from selfspec.engine.runners.cuda_graph.buffers import (
    TOKEN,
    TOTAL,
    DraftRead,
    GreedyOutcome,
    SampledOutcome,
    StaticRound,
)
from selfspec.engine.runners.cuda_graph.drafting import Drafting, is_weight
from selfspec.engine.runners.cuda_graph.paged_attention import whole_pages
from selfspec.engine.runners.cuda_graph.streams import HostRead, streams_for
from selfspec.engine.runners.runner import SequenceRound
from selfspec.engine.sampling import distribution, non_finite
from selfspec.engine.verification import NO_TOKEN

SMALLEST_SPAN = 256
"""Attention with masks looks at so many positions, or a power of two times as many, or the whole cache: the sizes that are
captured. Where it takes the length from the device there are no such sizes."""
SMALLEST_CACHE = 4096
"""Positions of the smallest KV cache, unless the model has fewer: a longer one makes all captures anew."""
BLOCK = 8
"""Layers are captured in blocks of so many: every exit layer and plain steps share all but the one it ends in."""
_FEW_ROWS = 16


def captured_length(needed: int, max_positions: int, paged: bool = False) -> int:
    """Positions of the cache for a text of `needed`: a power of two, so that growing texts seldom outgrow it, or all that the
    model has. paged: rounded up to whole pages."""
    length = min(max(_power_of_two(needed), SMALLEST_CACHE), max(max_positions, needed))
    return whole_pages(length) if paged else length


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


class CudaGraphRunner:
    """Runs one text's rounds from captures on its KV cache; see `Runner`. It lasts as long as its cache.

    cache: must hold finite numbers everywhere, so it is cleared, unless `cleared` says that it does.
    """

    copies = False  # a pass takes as many rows as it was captured for

    def __init__(self, model: LayerSkipModel, cache: KVCache, *, cleared: bool = False) -> None:
        self.cache = cache
        self._model = model
        self._states: dict[tuple[int, ...], HiddenStates] = {}
        self._earlier = (0, 0.0)  # captures and their seconds of buffers that were outgrown
        self._streams = streams_for(model.device)
        self._round = StaticRound(model, cache, _FEW_ROWS, BLOCK, self._streams)
        self._q = torch.empty(0, dtype=torch.float32, device=model.device)  # [max_rows, vocab] when sampling
        self._look_read, self._verdict_read = self._reads()
        self._ahead: tuple[object, ...] | None = None  # the pass that was launched before it was asked for
        self._launched: _Launched | None = None  # the round at hand
        if not cleared:
            self.clear()

    @property
    def num_captures(self) -> int:
        return self._earlier[0] + self._round.captures.num_captures

    @property
    def capture_seconds(self) -> float:
        return self._earlier[1] + self._round.captures.seconds

    def begin(self) -> None:
        """A new text begins: nothing of the one before may be relied on."""
        self._ahead = None
        self._streams.resume()

    def leave(self) -> None:
        """The text goes on eagerly: what was launched ahead must not run beside that."""
        self._ahead = None
        self._streams.resume()

    def come_back(self, rows: int) -> None:
        """The text goes on from captures again; its first `rows` rows are right.

        What eager rounds left behind them may be NaN, which no mask hides.
        """
        self.begin()
        with torch.inference_mode():
            self.cache.keys[..., rows:].zero_()
            self.cache.values[:, :, rows:].zero_()

    def clear(self) -> None:
        """What is masked is still multiplied by 0, which only makes 0 of numbers."""
        self._ahead = None
        with torch.inference_mode():
            self.cache.keys.zero_()
            self.cache.values.zero_()
            self._round.hidden.zero_()

    def states(self, states: HiddenStates, rows: int) -> HiddenStates:
        """Buffers that captures know the place of."""
        return self._states_of(states.layers, rows)

    def _states_of(self, layers: tuple[int, ...], rows: int) -> HiddenStates:
        self.reserve(rows)
        if layers not in self._states:
            self._states[layers] = HiddenStates(self._model, layers, max_rows=self._round.max_rows)
        return self._states[layers]

    def draft(self, seq_rounds: Sequence[SequenceRound]) -> None:
        """Launch the draft. Raises CaptureError if graphs fail here, as `verify` and `accept` do."""
        self._streams.resume()
        (seq_round,) = seq_rounds
        self._launched = None
        if seq_round.exit_layer is not None:
            self.reserve(seq_round.max_speculations + 1)
            self._first_pass(seq_round, seq_round.exit_layer)
            drafting = Drafting(self, seq_round, seq_round.exit_layer, seq_round.greedy)
            drafting.run()
            self._launched = _Launched(drafting)

    def verify(self, seq_rounds: Sequence[SequenceRound]) -> None:
        """Launch the verification, the acceptance on the device, and the next round's first pass."""
        (seq_round,) = seq_rounds
        if self._launched is None:
            self._launched = self._verify_plain(seq_round)
        elif self._launched.error is None:
            self._verify_draft(seq_round, self._launched)

    def accept(self, seq_rounds: Sequence[SequenceRound]) -> list[RoundResult]:
        """Read what came out."""
        (seq_round,) = seq_rounds
        launched = self._launched
        assert launched is not None
        if launched.error is not None:
            return [RoundResult.broken(launched.error)]
        plain = launched.drafting is None
        outcome = self._read_plain(seq_round, launched) if plain else self._read_draft(seq_round, launched)
        self.cache.declare(seq_round.length + len(outcome.draft_tokens))
        kind = "plain step" if seq_round.exit_layer is None else "speculative round"
        if first_rounds.due(self._model, kind):
            accepted = outcome.num_accepted
            tokens = [seq_round.pending, *outcome.block[:accepted]]
            first_rounds.check(
                self._model,
                self.cache,
                kind,
                torch.tensor(tokens, dtype=torch.long, device="cpu").to(self._model.device),
                seq_round.length - 1,
                self._round.logits[: accepted + 1],
                outcome.block if seq_round.greedy and outcome.failure is None else (),
            )
        return [outcome]

    def learning(self) -> AbstractContextManager[None]:
        """On a stream of its own, which waits for the round but not for the pass launched after it.

        Not so where several processes hold the model. Learning needs sums as well, and sums on two streams at once may come
        in another order in each process, which then wait for one another.
        """
        if self._model.num_ranks > 1:
            return nullcontext()
        return self._streams.beside(self._verdict_read.event)

    def warm_up(
        self, exit_layers: tuple[int, ...], max_rows: int, max_length: int, layers_to_learn: tuple[int, ...]
    ) -> None:
        """Capture what greedy rounds of up to `max_rows` rows at these exit layers, and plain steps, may need in texts of up
        to `max_length` tokens, with and without learning from some layers; sampling needs two captures more."""
        self.begin()
        self.reserve(max_rows)
        rounds, num_layers = self._round, self._model.num_layers
        watching = [None, self._states_of(layers_to_learn, max_rows)] if layers_to_learn else [None]
        rows = _row_buckets(max_rows)
        rounds.start(0, 0)  # bodies run while they are captured: at places that exist
        rounds.last.zero_()
        limit = self.cache.max_length
        spans: list[int | None] = [None] if rounds.paged else [*_spans(min(max_length, limit), limit)]
        for span in spans:
            for states in watching:
                for stop in (*exit_layers, num_layers):
                    rounds.one_row(0, stop, span, states, ahead=True)
                for exit_layer in exit_layers:
                    for count in rows if span is not None else [count for count in rows if count <= limit]:
                        rounds.all_rows(exit_layer, num_layers, count, span, states, ahead=True)
        for choose in (True, False):
            for confidence in (True, False):
                for exit_layer in exit_layers:
                    rounds.look(exit_layer, confidence=confidence, entropy=False, choose=choose, ahead=True)
            for count in rows:
                rounds.judge(count, choose=choose, ahead=True)

    def layers(self, rows: int, length: int) -> None:
        """All layers but the first over so many rows behind a text: for timing. The first runs for one row at a time only.

        Like `head`, for as many rows as are reserved.
        """
        self._round.base.fill_(length)
        self._round.last.fill_(rows - 1)
        self._round.all_rows(1, self._model.num_layers, self._rows_run(rows, length), self._span(length + rows), None)

    def head(self, rows: int) -> None:
        """Norm, head and choice over so many rows, and reading it: for timing."""
        self._round.judge(_bucket(rows), choose=True)
        self._verdict_read.start(self._round.verdict)
        self._verdict_read.wait()

    def _reads(self) -> tuple[HostRead, HostRead]:
        rows = self._round.max_rows
        return HostRead(4 * rows, self._streams), HostRead(3 + 2 * rows, self._streams)

    def reserve(self, rows: int) -> None:
        """Make buffers for so many rows; new ones mean new captures."""
        if rows <= self._round.max_rows:
            return
        self._earlier = (self.num_captures, self.capture_seconds)
        over = self._streams.event()
        over.record()
        over.synchronize()  # a graph that is given up must not be running
        self._round = StaticRound(self._model, self.cache, _power_of_two(rows), BLOCK, self._streams)
        self._look_read, self._verdict_read = self._reads()
        self._states.clear()
        self._ahead = None

    def _rows_run(self, rows: int, position: int) -> int:
        """Of the capture that serves so many rows from this position on: no more than the cache has room for."""
        bucket = _bucket(rows)
        # In a cache that is almost full, exactly these rows are captured. Behind masks, added rows need no room.
        return rows if self._round.paged and position + bucket > self.cache.max_length else bucket

    def _span(self, length: int) -> int | None:
        """How many positions attention looks at, to see `length` of them; None where the device says how many there are."""
        if self._round.paged:
            return None
        return min(max(_power_of_two(length), SMALLEST_SPAN), self.cache.max_length)

    def _first_pass(self, seq_round: SequenceRound, stop: int) -> None:
        """The pending token through layers [0, stop), unless the last round launched that already."""
        ahead, self._ahead = self._ahead, None
        if ahead != (stop, seq_round.states, seq_round.length):
            self._round.start(seq_round.pending, seq_round.length - 1)
            self._round.one_row(0, stop, self._span(seq_round.length), seq_round.states)

    def _look_ahead(self, seq_round: SequenceRound, stop: int, most_tokens: int) -> bool:
        """Launch the next round's first pass if there will be one, at the same exit layer; its token is on the device."""
        left = seq_round.remaining - most_tokens
        if left < (1 if seq_round.exit_layer is None else 2):
            return False
        if seq_round.states is not None and seq_round.learns_next:
            return False  # it would write over what is still to be learned from
        states = (
            self._states_of(seq_round.observes.shadow_layers, self._round.max_rows) if seq_round.learns_next else None
        )
        self._round.one_row(0, stop, self._span(seq_round.length + most_tokens), states)
        self._ahead = (stop, states)
        return True

    def _looked_ahead(self, launched: bool, length: int) -> None:
        """What was launched is right for a text of this length only."""
        if launched and self._ahead is not None:
            self._ahead = (*self._ahead, length)

    def _verify_plain(self, seq_round: SequenceRound) -> _Launched:
        """A plain step: the pending token through all layers."""
        rounds, sampler, stop = self._round, seq_round.sampler, self._model.num_layers
        launched = _Launched()
        self._first_pass(seq_round, stop)
        rounds.last.zero_()
        rounds.judge(1, choose=seq_round.greedy)
        if seq_round.greedy:
            launched.target = _kept(rounds.targets, seq_round)
            self._verdict_read.start(rounds.verdict)
        else:
            processed, launched.refusal = sampler.process_willing(rounds.logits[:1], seq_round.tokens, seq_round.length)
            launched.target = processed.argmax(dim=-1)
            if sampler.do_sample:
                launched.p = distribution(processed)
                token, total = sampler.draw_on_device(launched.p[0])
            else:
                token, total = launched.target, processed.amax(dim=-1)
            none = torch.zeros_like(token)  # of no drafts none is accepted
            self._verdict_read.start(torch.cat([none.double(), token.double(), total.double()]))
            rounds.settle(none, token)
        launched.ahead = self._look_ahead(seq_round, stop, 1)
        return launched

    def _read_plain(self, seq_round: SequenceRound, launched: _Launched) -> RoundResult:
        numbers = self._verdict_read.wait()
        if seq_round.greedy:
            greedy = GreedyOutcome.decode(numbers, 1)
            chosen, is_sound = greedy.targets[0], not isnan(greedy.logits[0])
        else:
            taken = SampledOutcome.decode(numbers)  # `total` is the token's logit where none is drawn
            chosen = taken.token
            is_sound = is_weight(taken.total) if seq_round.sampler.do_sample else not isnan(taken.total)
        failure = None if is_sound else _failure(launched.refusal, 0, seq_round.length)
        self._looked_ahead(launched.ahead, seq_round.length + 1)
        return RoundResult(
            draft_tokens=(),
            num_accepted=0,
            block=[chosen if failure is None else NO_TOKEN],
            target_tokens=launched.target,
            p=launched.p,
            stop_cause="none",
            confidences=None,
            acceptance_probabilities=None,
            failure=failure,
        )

    def _verify_draft(self, seq_round: SequenceRound, launched: _Launched) -> None:
        assert seq_round.exit_layer is not None
        assert launched.drafting is not None
        rounds, count = self._round, launched.drafting.count
        rounds.last.fill_(count)
        rows = _bucket(count + 1)
        span = self._span(seq_round.length + count)
        rows_run = self._rows_run(count + 1, seq_round.length - 1)
        rounds.all_rows(seq_round.exit_layer, self._model.num_layers, rows_run, span, seq_round.states)
        rounds.judge(rows, choose=seq_round.greedy)
        if not launched.drafting.seen:  # nothing was read while drafting
            self._look_read.start(rounds.looks[:count].flatten())
        if seq_round.greedy:
            launched.target = _kept(rounds.targets, seq_round)
            self._verdict_read.start(rounds.verdict)
        else:
            launched.target, launched.p, launched.refusal = self._accept(seq_round, count)
        launched.ahead = self._look_ahead(seq_round, seq_round.exit_layer, count + 1)

    def _read_draft(self, seq_round: SequenceRound, launched: _Launched) -> RoundResult:
        draft, rounds, sampler = launched.drafting, self._round, seq_round.sampler
        assert draft is not None
        count, ahead = draft.count, launched.ahead
        tokens, confidences_seen, cause = draft.finish()
        kept = len(tokens)
        numbers = self._verdict_read.wait()
        probabilities = None
        failure: Exception | None = None
        if sampler.do_sample:
            drawn = SampledOutcome.decode(numbers)
            accepted = min(drawn.num_accepted, kept)
            if not is_weight(drawn.total):
                failure = _failure(launched.refusal, accepted, seq_round.length)
            block = [*tokens[:accepted], drawn.token if failure is None else NO_TOKEN]
            probabilities = tuple(drawn.rates[: min(accepted + (failure is None), kept)])
        else:
            greedy = GreedyOutcome.decode(numbers, kept + 1)
            chosen = greedy.targets
            sound = next((row for row, value in enumerate(greedy.logits) if isnan(value)), kept + 1)
            accepted = accept_greedy(tokens[:sound], chosen)
            if accepted == sound:
                if count and bool(rounds.logits[accepted].isnan().any()):
                    self._forget(
                        seq_round.length - 1
                    )  # NaN of a drafted row spoils the rows before it, behind the mask
                    return self._read_plain(seq_round, self._verify_plain(seq_round))
                failure = _failure(launched.refusal, accepted, seq_round.length)
            block = [*chosen[:accepted], chosen[accepted] if failure is None else NO_TOKEN]
            ahead = ahead and greedy.num_accepted == accepted  # else the device went on from another place
        self._looked_ahead(ahead, seq_round.length + accepted + 1)
        return RoundResult(
            draft_tokens=tuple(tokens),
            num_accepted=accepted,
            block=block,
            target_tokens=launched.target,
            p=launched.p,
            stop_cause=cause,
            confidences=confidences_seen if seq_round.observes.confidence else None,
            acceptance_probabilities=probabilities,
            failure=failure,
            dropped_token=draft.dropped,
            num_discarded=draft.num_discarded,
        )

    def _accept(
        self, seq_round: SequenceRound, count: int
    ) -> tuple[Tensor, Tensor | None, tuple[int, Exception] | None]:
        """Acceptance behind processors or sampling, operations one by one on the device: target tokens, p, and the row at
        which a processor raised an exception, if one did.

        Both are new tensors, complete before reading starts. What is read is a `SampledOutcome`, or when greedy a
        `GreedyOutcome` of as many rows as there are.
        """
        rounds, sampler = self._round, seq_round.sampler
        drafts = rounds.drafts[:count]
        processed, refusal = sampler.process_willing(rounds.logits[: count + 1], seq_round.tokens, seq_round.length)
        if not sampler.do_sample:
            best = processed.max(dim=-1)
            target = best.indices
            num_accepted = accept_greedy_on_device(drafts, target)
            parts = (num_accepted, target, best.values)
            self._verdict_read.start(torch.cat([part.double() for part in parts]))
            rounds.settle(num_accepted, target.index_select(0, num_accepted))
            return target, None, refusal
        target = processed.argmax(dim=-1)
        p = distribution(processed)
        uniforms = sampler.uniforms(count, p.device)
        num_accepted, weights = accept_sampled_on_device(p, self._q[:count], drafts, uniforms)
        token, total = sampler.draw_on_device(weights)
        rates = acceptance_probabilities(p, self._q[:count], drafts)
        self._verdict_read.start(torch.cat([num_accepted.double(), token.double(), total.double(), rates.double()]))
        rounds.settle(num_accepted, token)
        return target, p, refusal

    def _choose(self, seq_round: SequenceRound, index: int) -> bool:
        """The token drafted from row `index`, behind processors or sampling; it becomes the next row's.

        False if a processor raises an exception: there is no token then.
        """
        rounds, sampler = self._round, seq_round.sampler
        processed, refusal = sampler.process_willing(rounds.row_logits, seq_round.tokens, seq_round.length + index)
        if refusal is not None:
            return False
        look = rounds.looks[index]
        if sampler.do_sample:
            if self._q.shape[0] < rounds.max_rows:
                shape = (rounds.max_rows, self._model.vocab_size)
                self._q = torch.empty(shape, dtype=torch.float32, device=self._model.device)
            self._q[index].copy_(distribution(processed[0]))
            token, total = sampler.draw_on_device(self._q[index])
            look[TOTAL : TOTAL + 1].copy_(total)
        else:
            token = processed.argmax(dim=-1)
        look[TOKEN : TOKEN + 1].copy_(token)
        rounds.token.copy_(token)
        rounds.drafts[index : index + 1].copy_(token)
        seq_round.tokens[0, seq_round.length + index : seq_round.length + index + 1].copy_(token)
        return True

    def _forget(self, start: int) -> None:
        """Clear what the cache holds from this position on, which is NaN perhaps: a masked position is multiplied by 0."""
        self._ahead = None
        self.cache.keys[..., start:].zero_()
        self.cache.values[:, :, start:].zero_()
        self._round.hidden.zero_()

    def look_at(self, seq_round: SequenceRound, index: int, fast: bool) -> bool:
        """Norm and head on row `index`, and its token; False if it has none."""
        assert seq_round.exit_layer is not None
        observes = seq_round.observes
        self._round.look(seq_round.exit_layer, confidence=observes.confidence, entropy=observes.entropy, choose=fast)
        return fast or self._choose(seq_round, index)

    def advance(self, seq_round: SequenceRound, index: int, exit_layer: int) -> None:
        """Row `index` through the exit layer's layers."""
        self._round.one_row(0, exit_layer, self._span(seq_round.length + index), seq_round.states)

    def start_reading(self, index: int) -> None:
        self._look_read.start(self._round.looks[index])

    def looks(self) -> list[DraftRead]:
        return DraftRead.decode(self._look_read.wait())

    def exit_hidden(self, index: int) -> Tensor:
        """Exit hidden state of a row, [hidden], a copy: the row's place is used again."""
        return self._round.hidden[index].clone()


@dataclass(slots=True, eq=False)
class _Launched:
    """What was launched in a round and is still to be read. drafting: None in a plain step. ahead: whether the next round's
    first pass was launched. refusal: the row at which a processor raised, and what. The rest as in `RoundResult`."""

    drafting: Drafting | None = None
    target: Tensor | None = None
    p: Tensor | None = None
    refusal: tuple[int, Exception] | None = None
    ahead: bool = False

    @property
    def error(self) -> Exception | None:
        """What the policy raised while drafting."""
        return None if self.drafting is None else self.drafting.error


def _kept(target: Tensor, seq_round: SequenceRound) -> Tensor | None:
    """Target tokens for the record, if somebody learns from them: a copy, since their place is used again.

    To be made before the verdict is read: learning waits for that event, and for nothing that is launched later.
    """
    return target.clone() if seq_round.learns else None


def _failure(refusal: tuple[int, Exception] | None, row: int, length: int) -> Exception:
    """Why a row gave no token: the exception of a processor, or else its numbers."""
    if refusal is not None and refusal[0] == row:
        return refusal[1]
    return non_finite(f"position {length + row}")


def _bucket(rows: int) -> int:
    """The row count of the capture that serves so many rows."""
    return _power_of_two(rows)


def _row_buckets(max_rows: int) -> list[int]:
    return sorted({_bucket(rows) for rows in range(1, max_rows + 1)})


def _spans(max_length: int, limit: int) -> list[int]:
    """The spans that texts of up to `max_length` tokens go through."""
    spans = [min(SMALLEST_SPAN, limit)]
    while spans[-1] < max_length:
        spans.append(min(2 * spans[-1], limit))
    return spans
