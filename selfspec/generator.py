"""`SelfSpecGenerator`: prefill, then rounds of plan, draft, verify, accept, roll back, learn, until the text ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from layerskip_models import LayerSkipModel, from_transformers, load_model, load_tokenizer
from policies import Plan, Policy, RoundContext, RoundRecord, autoregressive, check_exit_layer, parse_policy
from selfspec.accept import accept_greedy, accept_sampled, acceptance_probabilities
from selfspec.calibrate import measured_cost
from selfspec.config import GenerationHost, Request, make_request
from selfspec.defaults import DEFAULT_POLICY, fixed_setting
from selfspec.draft import Drafter
from selfspec.kv_cache import KVCache
from selfspec.sampling import Sampler, non_finite
from selfspec.shadow import ShadowRecorder
from selfspec.stats import GenerationStats, StatsBuilder
from selfspec.stop_conditions import StopReason
from selfspec.verify import verify

_PREFILL_CHUNK = 1024  # rows per prefill pass, so that a long prompt's activations stay small


class Streamer(Protocol):
    """What `streamer` must have: transformers' BaseStreamer. One with `on_round(record)` gets every round's record too."""

    def put(self, value: Tensor) -> None:
        """The prompt's ids first, then the committed ids of every round, int64 [n] on the CPU."""
        ...

    def end(self) -> None:
        """The text is complete, or generation broke off."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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


class SelfSpecGenerator:
    """Self-speculative decoding with one model: its first layers draft, the rest verify, the output stays the model's own.

    model: what `layerskip_models.load_model` returns, or a transformers LlamaForCausalLM, whose weights are then copied
        into the layout that decoding is fast with (twice the memory; the model stays usable and is not changed;
        in-place updates of its weights are noticed and copied again). Generators may share either.
    tokenizer: needed for text prompts, `text` in the result and stop strings.
    policy: its name ("del", "ls:3-6", ...), a `Policy`, or None for "auto".
    Raises ValueError for an unsupported architecture or a policy that does not fit the model.
    """

    def __init__(
        self,
        model: LayerSkipModel | LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        policy: str | Policy | None = None,
    ) -> None:
        self._source = None if isinstance(model, LayerSkipModel) else model
        self._source_version: object = None
        if isinstance(model, LayerSkipModel):
            self.model = model
        else:
            self.model = from_transformers(model)
            self._source_version = _weights_version(model)
        self.tokenizer = tokenizer
        self._policies: dict[str, Policy] = {}
        self._default = policy
        if policy is not None:
            self._named_policy(policy)  # a wrong one is an error here, not at the first call
        self._idle_caches: list[KVCache] = []  # at most one, kept for the next call

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        policy: str | Policy | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        local_files_only: bool = False,
    ) -> SelfSpecGenerator:
        """Load a checkpoint and its tokenizer; arguments as in `layerskip_models.load_model`."""
        options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        model = load_model(name_or_path, dtype=dtype, device=device, **options)
        return cls(model, load_tokenizer(name_or_path, **options), policy)

    def generate(
        self,
        prompt: str | list[int] | Tensor,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | list[int] | None = None,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        streamer: Streamer | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        policy: str | Policy | None = None,
        exit_layer: int | None = None,
        num_speculations: int | None = None,
        generation_config: GenerationConfig | None = None,
        trace: bool = False,
    ) -> GenerationResult:
        """Continue a prompt.

        prompt: text, token ids, or an integer tensor [n] or [1, n].
        max_new_tokens .. stop_strings: as in transformers' GenerationConfig, whose defaults and merging apply (this call
            over `generation_config` over the checkpoint's). eos_token_id=[] means never stop at a token. Without any
            length, 128 new tokens.
        seed, generator: of the sampling; one at most. A generator must be on the model's device. A policy with measured cost
            (the default) drafts a little otherwise in every process, and then draws otherwise, too: for samples that a seed
            repeats exactly choose another, such as "auto:cost=layers".
        streamer: gets committed tokens only, each once, as soon as its round ends.
        logits_processor, stopping_criteria: transformers' lists. Processors must be pure functions of (input_ids, scores).
            Criteria see the full prefix of every committed token.
        policy, or exit_layer with num_speculations: how to speculate in this call. num_speculations=0 is plain
            autoregressive decoding whatever the policy. Of exit_layer and num_speculations, the one not given is taken
            from the checkpoint's best known fixed setting (see `selfspec.defaults`).
        trace: keep every round's record in the result.
        Raises ValueError or TypeError for what cannot be, and NonFiniteLogitsError (a RuntimeError) on NaN logits.
        """
        start = perf_counter()
        chosen = self.resolve_policy(policy, exit_layer, num_speculations)
        self._refresh_weights()
        options = {
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "eos_token_id": eos_token_id,
            "stop_strings": stop_strings,
        }
        request = make_request(
            host=GenerationHost(self.model.config, self._checkpoint_config(), self.model.device),
            prompt=prompt,
            tokenizer=self.tokenizer,
            generation_config=generation_config,
            options=options,
            seed=seed,
            generator=generator,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
        )
        cache = self._take_cache(request)
        try:
            if streamer is not None:
                streamer.put(request.prompt)
            with torch.inference_mode():
                return self._generate(request, chosen, cache, streamer, start, trace)
        finally:
            if not self._idle_caches:
                self._idle_caches.append(cache)
            if streamer is not None:
                streamer.end()

    def _generate(
        self,
        request: Request,
        policy: Policy,
        cache: KVCache,
        streamer: Streamer | None,
        start: float,
        keep_trace: bool,
    ) -> GenerationResult:
        """One call: prefill, then rounds until a stop condition holds."""
        decoding = _Decoding(self.model, cache, request, policy)
        first_token_seconds = 0.0
        records: list[RoundRecord] = []
        for block, record in decoding.run():
            if record is None:
                first_token_seconds = perf_counter() - start
            elif keep_trace:
                records.append(record)
            if streamer is not None:
                on_round = getattr(streamer, "on_round", None)
                if on_round is not None and record is not None:
                    on_round(record)
                streamer.put(torch.tensor(block))
        num_prompt = request.prompt.numel()
        sequences = decoding.tokens[:, : decoding.length].to("cpu", copy=True)
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(sequences[0, num_prompt:], skip_special_tokens=True)
        stats = decoding.stats.finish(
            num_prompt_tokens=num_prompt,
            seconds=perf_counter() - start,
            prefill_seconds=decoding.prefill_seconds,
            first_token=first_token_seconds,
            cache_bytes=cache.num_bytes,
        )
        assert decoding.stop_reason is not None
        return GenerationResult(
            sequences=sequences,
            text=text,
            stop_reason=decoding.stop_reason,
            stats=stats,
            policy=policy.name,
            trace=tuple(records) if keep_trace else None,
        )

    def _take_cache(self, request: Request) -> KVCache:
        """The idle cache if it is long enough, else a new one, with a row for every token.

        It is taken out for the call, so that a nested call (from a streamer, say) or another thread gets its own.
        """
        needed = request.prompt.numel() + request.stops.max_new_tokens
        cache = self._idle_caches.pop() if self._idle_caches else None
        if cache is None or cache.max_length < needed:
            cache = KVCache(self.model, needed)
        cache.roll_back(0)
        return cache

    def _checkpoint_config(self) -> GenerationConfig:
        """The checkpoint's own generation configuration; of a transformers model, as it is now."""
        return self.model.generation_config if self._source is None else self._source.generation_config

    @property
    def policy(self) -> Policy:
        """What `generate` uses when a call names no policy; "auto" unless another was given. Calibrates when first asked."""
        if self._default is not None:
            return self._named_policy(self._default)
        return self._named_policy(DEFAULT_POLICY if self.model.num_layers > 1 else "ar")

    def _named_policy(self, policy: str | Policy) -> Policy:
        """A policy by name, made once: what it learns lasts between calls, as long as the generator."""
        if isinstance(policy, Policy):
            return policy
        name = policy.strip()
        if name not in self._policies:
            measure = partial(measured_cost, self.model)
            self._policies[name] = parse_policy(name, num_layers=self.model.num_layers, measure=measure)
        return self._policies[name]

    def resolve_policy(
        self,
        policy: str | Policy | None = None,
        exit_layer: int | None = None,
        num_speculations: int | None = None,
    ) -> Policy:
        """The policy that a call of `generate` with these arguments uses; with what it has learned so far.

        Raises ValueError as `generate` does.
        """
        num_layers = self.model.num_layers
        if exit_layer is not None:
            check_exit_layer(exit_layer, num_layers)
        if num_speculations == 0 and not isinstance(num_speculations, bool):
            return autoregressive(num_layers)
        if exit_layer is None and num_speculations is None:
            return self.policy if policy is None else self._named_policy(policy)
        if policy is not None:
            raise ValueError("give policy, or exit_layer with num_speculations, not both")
        default_exit, default_length = fixed_setting(self.model.name, num_layers)
        chosen_exit = default_exit if exit_layer is None else exit_layer
        chosen_length = default_length if num_speculations is None else num_speculations
        return parse_policy(f"ls:{chosen_exit}-{chosen_length}", num_layers=num_layers)

    def _refresh_weights(self) -> None:
        """Copy the weights again if the transformers model they came from was updated since."""
        if self._source is None:
            return
        version = _weights_version(self._source)
        if version != self._source_version:
            self.model = from_transformers(self._source)
            self._source_version = version
            self._idle_caches.clear()


class _Decoding:
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
            watch = recorder.capture_last if recorder is not None and last == self.length else None
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
        capture = None if recorder is None else recorder.capture

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
        )
        drafted = perf_counter()
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
            draft_seconds=drafted - started,
            verify_seconds=verified - drafted,
        )
        return self._finish(record, committed, learning)

    def _autoregressive_step(self, plan: Plan) -> tuple[list[int], RoundRecord]:
        """A round without speculation: the pending token through all layers."""
        started = perf_counter()
        num_before = self.length
        recorder = self._recorder_for(1)
        watch = None if recorder is None else (lambda layer, rows: recorder.capture(0, layer, rows))
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


def _weights_version(model: LlamaForCausalLM) -> tuple[tuple[int, int], ...]:
    """Changes when a parameter of the model is replaced or updated in place."""
    return tuple((p.data_ptr(), p._version) for p in model.parameters())
