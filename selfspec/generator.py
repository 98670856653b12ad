"""`SelfSpecGenerator`: what `generate` takes and returns. The rounds themselves are in `selfspec.decoding`."""

from __future__ import annotations

from collections.abc import Iterable
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
from policies import Policy, RoundRecord, autoregressive, check_exit_layer, parse_policy
from policies.base import check_layers
from selfspec.calibrate import measured_cost
from selfspec.captured import CapturedRunner, captured_length
from selfspec.config import GenerationHost, Request, make_request
from selfspec.decoding import Decoding
from selfspec.defaults import DEFAULT_POLICY, fixed_setting
from selfspec.kv_cache import KVCache
from selfspec.preverify import PreVerifiers
from selfspec.runner import EagerRunner, Runner, RunnerChoice, RunnerName, on_device, resolve_runner
from selfspec.sampling import NonFiniteLogitsError
from selfspec.stats import GenerationStats
from selfspec.stop_conditions import StopReason


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
    runner: "eager", "captured" (CUDA graphs; on a CPU a slow stand-in, for tests), or "auto": captured on CUDA, else eager.
    Raises ValueError for an unsupported architecture, a policy that does not fit the model, or another runner.
    """

    def __init__(
        self,
        model: LayerSkipModel | LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        policy: str | Policy | None = None,
        *,
        runner: RunnerChoice = "auto",
    ) -> None:
        self._source = None if isinstance(model, LayerSkipModel) else model
        self._source_version: object = None
        if isinstance(model, LayerSkipModel):
            self.model = model
        else:
            self.model = from_transformers(model)
            self._source_version = _weights_version(model)
        self.tokenizer = tokenizer
        self.runner: RunnerName = resolve_runner(runner, self.model.device)
        self._policies: dict[str, Policy] = {}
        self.load_preverifier = PreVerifiers(self.model)  # Pacer's, for policies by name
        self._default = policy
        if policy is not None:
            self._named_policy(policy)  # a wrong one is an error here, not at the first call
        self._idle_runners: list[Runner] = []  # at most one, with its KV cache, kept for the next call

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        policy: str | Policy | None = None,
        runner: RunnerChoice = "auto",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        local_files_only: bool = False,
    ) -> SelfSpecGenerator:
        """Load a checkpoint and its tokenizer; arguments as in `layerskip_models.load_model`."""
        options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        model = load_model(name_or_path, dtype=dtype, device=device, **options)
        return cls(model, load_tokenizer(name_or_path, **options), policy, runner=runner)

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
        logits_processor, stopping_criteria: transformers' lists. Processors must be pure functions of (input_ids, scores);
            they also see texts that are only drafted, and may raise an exception for those. Criteria see the full prefix of
            every committed token.
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
        runner = self._take_runner(request.prompt.numel() + request.stops.max_new_tokens)
        try:
            if streamer is not None:
                streamer.put(request.prompt)
            with torch.inference_mode(), on_device(self.model.device):
                return self._generate(request, chosen, runner, streamer, start, trace)
        except NonFiniteLogitsError:
            runner.clear()
            raise
        finally:
            self._keep_runner(runner)
            if streamer is not None:
                streamer.end()

    def _generate(
        self,
        request: Request,
        policy: Policy,
        runner: Runner,
        streamer: Streamer | None,
        start: float,
        keep_trace: bool,
    ) -> GenerationResult:
        """One call: prefill, then rounds until a stop condition holds."""
        captures, capture_seconds = runner.num_captures, runner.capture_seconds
        decoding = Decoding(self.model, runner.cache, request, policy, runner)
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
            cache_bytes=runner.cache.num_bytes,
            runner=self.runner if decoding.runner is runner else "eager",
            num_captures=runner.num_captures - captures,
            capture_seconds=runner.capture_seconds - capture_seconds,
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

    def warm_up(
        self,
        policy: str | Policy | None = None,
        *,
        exit_layers: Iterable[int] | None = None,
        max_speculations: int = 10,
        max_length: int = 1024,
    ) -> tuple[int, float]:
        """Capture ahead what texts of up to `max_length` tokens, prompt included, need: a call then need not.

        policy: whose learning is captured, too; None for the generator's. It is calibrated now if its costs are measured.
        exit_layers: that it may choose; None for all it learns from, or all of the model if it says nothing.
        max_speculations: most tokens drafted in a round. What a call still needs beyond that (sampling, a longer text) it
        captures itself, and its statistics count it. An eager runner has nothing to capture.
        Returns how many captures were made and the seconds they took.
        """
        chosen = self.resolve_policy(policy)
        num_layers = self.model.num_layers
        layers = exit_layers or chosen.needs.shadow_layers or range(1, num_layers)
        checked = check_layers(tuple(layers), num_layers)
        self._refresh_weights()
        runner = self._take_runner(min(max_length, self.model.max_positions))
        before = runner.num_captures, runner.capture_seconds
        try:
            if isinstance(runner, CapturedRunner):
                with torch.inference_mode(), on_device(self.model.device):
                    runner.warm_up(checked, max_speculations + 1, max_length, chosen.needs.shadow_layers)
            return runner.num_captures - before[0], runner.capture_seconds - before[1]
        finally:
            self._keep_runner(runner)

    def _take_runner(self, needed: int) -> Runner:
        """The idle runner if its KV cache is long enough, else a new one, with a row for each of so many tokens.

        It is taken out for the call, so that a nested call (from a streamer, say) or another thread gets its own.
        """
        runner = self._idle_runners.pop() if self._idle_runners else None
        if runner is None or runner.cache.max_length < needed:
            if self.runner == "captured":
                cache = KVCache(self.model, captured_length(needed, self.model.max_positions))
                runner = CapturedRunner(self.model, cache)
            else:
                runner = EagerRunner(self.model, KVCache(self.model, needed))
        runner.cache.roll_back(0)
        return runner

    def _keep_runner(self, runner: Runner) -> None:
        if not self._idle_runners:
            self._idle_runners.append(runner)

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
            measure = partial(measured_cost, self.model, self.runner)
            self._policies[name] = parse_policy(
                name, num_layers=self.model.num_layers, measure=measure, preverifier=self.load_preverifier
            )
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
            self.load_preverifier = PreVerifiers(self.model)
            self._source_version = version
            self._idle_runners.clear()


def _weights_version(model: LlamaForCausalLM) -> tuple[tuple[int, int], ...]:
    """Changes when a parameter of the model is replaced or updated in place."""
    return tuple((p.data_ptr(), p._version) for p in model.parameters())
