"""`SelfSpecGenerator`: what `generate` takes and returns. A round is `selfspec.engine.round`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import Unpack

from layerskip_models import LayerSkipModel, load_model
from layerskip_models.checkpoints.loading import begin_tokenizer
from layerskip_models.draft_weights import DraftWeights
from layerskip_models.exits.lean import ExitsChoice
from policies import Policy, RoundRecord
from selfspec.batch import BatchError, check_all, completed
from selfspec.cache.copy_index import CopyStore, make_store, store_for
from selfspec.cache.pool import KeptTexts
from selfspec.cache.prefix_cache import PrefixCache
from selfspec.defaults import DEFAULT_BATCH_SIZE, DEFAULT_POLICY
from selfspec.engine.engine import BoundRequest, Engine, run_calls
from selfspec.engine.model_source import BoundModel, ModelSource
from selfspec.engine.policy_store import PolicyStore
from selfspec.engine.request import Request, check_context, check_ids, make_request, refuse_unknown
from selfspec.engine.results import GenerationResult
from selfspec.engine.runners.runner import RunnerChoice, RunnerName
from selfspec.messages import Messages, encode_messages
from selfspec.options import GenerationOptions, SpeculationOptions, spelled_out
from selfspec.pacer.inference import PreVerifiers
from selfspec.stream import GenerationStream

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[int] | Tensor | Messages


class Streamer(Protocol):
    """The interface of transformers' BaseStreamer. A streamer with `on_round(record)` also gets every round's record."""

    def put(self, value: Tensor) -> None:
        """Take the prompt's ids first, then the committed ids of every round, int64 [n] on the CPU."""
        ...

    def end(self) -> None:
        """End the text, which is complete, or whose generation failed."""
        ...


class SelfSpecGenerator:
    """Self-speculative decoding with one model: its first layers draft, the rest verify, and the output stays the same.

    model: what `load_model` returns, or a transformers model of a supported family. On a CPU its weights are copied into
        the engine's layout (twice the memory; the model itself is unchanged). On CUDA its parameters become views of the
        engine's tensors (once in memory, same values). Generators may share either. When its weights change, the next call
        uses the new ones: after an optimiser's step, `load_state_dict`, a merged adapter, a replaced parameter, whether or
        not through `.data`. **One exception:** a write through `.data` that changes only a few numbers of a tensor (a row,
        a single weight) is not noticed. Call `refresh` after such an edit.
    tokenizer: needed for text prompts, `text` in the result and stop strings.
    policy: its name ("del", "ls:3-6", ...), a `Policy`, or None for "auto".
    prefix_cache: memory for the keys and values of complete texts. A prompt that begins like a kept text is read only from
        where it differs (docs/chat.md). None: the last text is kept, and reused only where that changes no bit of the
        output: with our own CPU kernels. A size, such as "500MB" or a number of bytes: as many texts as fit, and always the
        last one. They are reused everywhere; with PyTorch's operators that may change the last digits, as another batch size
        does. 0: every prompt is read from its beginning.
    exits: adapters for the exits (docs/training.md). "auto": those that the model was loaded with, or in the folder of a
        transformers model's checkpoint; a path: those in that folder; None: no adapters.
    kv_dtype: data type of the KV cache. "auto": as the model was loaded, usually the dtype of its arithmetic; "bfloat16":
        half the memory of float32, with slightly different results (docs/kernels.md).
    draft_weights: a copy of the weights in fewer bits, to draft with (docs/fewer-bits.md). "auto": in 8 bits, once the
        default policy sees that exits promise less, if the weights are read from memory and three times the copy's size is
        free; "int8", "int4": from the start; "none": never. They change no text.
    draft_vocabulary: tokens that drafts choose among, besides those of the text (docs/fewer-bits.md): a number, for the most
        frequent ones; a file of ids; "auto": half where the head is much of a draft; "none": all. No text changes.
    runner: "eager", "graphs" (CUDA graphs of our own kernels) or "auto": graphs on CUDA where they can be, else eager.
    Raises ValueError for an unsupported architecture, a policy that does not fit the model, an unknown runner, or an invalid
    size.
    """

    def __init__(
        self,
        model: LayerSkipModel | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        policy: str | Policy | None = None,
        *,
        runner: RunnerChoice = "auto",
        prefix_cache: int | str | None = None,
        exits: ExitsChoice = "auto",
        kv_dtype: str | torch.dtype = "auto",
        draft_weights: DraftWeights = "auto",
        draft_vocabulary: int | str | Path = "auto",
    ) -> None:
        if isinstance(model, (str, Path)):
            raise TypeError(f"give a loaded model, or SelfSpecGenerator.from_pretrained({str(model)!r})")
        prefixes = PrefixCache.of(prefix_cache)
        self._models = ModelSource(model, runner, prefixes, exits, kv_dtype, draft_weights, draft_vocabulary)
        self.tokenizer = tokenizer
        self._policies = PolicyStore(policy)
        if policy is not None:
            self._policies.resolve(self.bound)  # fail now for a wrong one, not at the first call

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
        prefix_cache: int | str | None = None,
        exits: ExitsChoice = "auto",
        kv_dtype: str | torch.dtype = "auto",
        rows: int | None = None,
        num_loops: int | None = None,
        device_map: Literal["auto"] | None = None,
        draft_weights: DraftWeights = "auto",
        draft_vocabulary: int | str | Path = "auto",
    ) -> SelfSpecGenerator:
        """Load a checkpoint and its tokenizer; arguments as in `layerskip_models.load_model`.

        device_map: "auto" spreads the layers over all GPUs of this machine, for a model that does not fit into one. One GPU
            works at a time.
        """
        options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        tokenizer = begin_tokenizer(name_or_path, **options)
        if device_map is not None:
            if device_map != "auto" or device != "auto" or num_loops is not None:
                raise ValueError("device_map must be 'auto' or None, and goes without device and num_loops")
            from layerskip_models.checkpoints.spread_loading import load_spread

            model: LayerSkipModel = load_spread(name_or_path, dtype=dtype, exits=exits, **options)
        else:
            model = load_model(name_or_path, dtype=dtype, device=device, exits=exits, num_loops=num_loops, **options)
        if kv_dtype != "auto":
            model = model.with_kv_dtype(kv_dtype)
        if rows is not None:
            model = model.with_rows(rows)
        drafts: dict[str, Any] = {"draft_weights": draft_weights, "draft_vocabulary": draft_vocabulary}
        return cls(model, tokenizer(), policy, runner=runner, prefix_cache=prefix_cache, **drafts)

    @spelled_out
    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        streamer: Streamer | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Continue a prompt, or answer messages.

        prompt: text, token ids, or an integer tensor [n] or [1, n]. It may also be messages.
        messages: a conversation, [{"role": "user", "content": "..."}, ...], which the tokenizer's chat template turns into
            a prompt. If the last message is the assistant's, it is continued.
        max_new_tokens .. stop_strings: as in transformers' GenerationConfig, with its defaults and merging (this call
            over `generation_config` over the checkpoint's). A temperature of 0 means greedy decoding. Where neither names an
            eos_token_id, the tokenizer's end token ends a text as well as the checkpoint's; eos_token_id=[] means that no
            token ends it. Without any length, up to 128 new tokens are generated.
        seed, generator: for sampling; give at most one. A generator must be on the model's device. A policy with measured
            cost (the default) drafts slightly differently in every process, so the same seed gives other samples. To repeat
            samples exactly, choose another policy, such as "auto:cost=layers".
        streamer: gets committed tokens only, each once, as soon as its round ends.
        logits_processor, stopping_criteria: transformers' lists. Processors must be pure functions of (input_ids, scores).
            They also see drafts, and may raise an exception for those. Criteria see the text up to every committed token,
            in a tensor on the CPU whatever the model's device.
        policy, or exit_layer with num_speculations: how to speculate in this call. num_speculations=0 is plain
            autoregressive decoding whatever the policy. If only one of exit_layer and num_speculations is given, the other
            comes from the checkpoint's best known fixed setting (`selfspec.defaults`).
        copy_from: texts to copy drafts from, for policies that copy ("auto" does): templates, or the file being edited.
            A list of texts or token ids, or a store made from them (`copy_store`). The prompt itself need not be included.
        trace: keep every round's record in the result.
        Raises ValueError or TypeError for wrong arguments, and NonFiniteLogitsError (a RuntimeError) for NaN logits.
        """
        call = self.check(prompt, messages=messages, **options)
        result = None
        try:
            if streamer is not None:
                streamer.put(call.request.prompt.clone())
            with closing(run_calls([call])) as steps:
                for step in steps:
                    result = step.result
                    if streamer is not None:
                        _show(streamer, step.tokens, step.record)
        finally:
            if streamer is not None:
                streamer.end()
        assert result is not None
        return result

    def stream(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerationOptions]
    ) -> GenerationStream:
        """Continue a prompt piece by piece: `for piece in generator.stream("Once"): print(piece, end="")`.

        options: those of `generate`, except `streamer`. They are checked before this returns, with the same errors.
        Returns an iterator over pieces of text (lists of token ids without a tokenizer), at most one for each round.
        Where you may leave the loop early and keep the stream, write `with generator.stream(...) as stream:`, or `close` it.
        When the text is complete, `result` is what `generate` would have returned; the times in its statistics include what
        the caller did between pieces.
        """
        if "streamer" in options:
            raise TypeError("stream() takes no streamer: its pieces are what a streamer would get")
        return GenerationStream(self.check(prompt, messages=messages, **options))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        on_result: Callable[[int, GenerationResult], None] | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Continue many prompts, `batch_size` at a time in shared passes; the next joins when a text is complete.

        prompts: as in `generate`; a list of messages is one prompt.
        options: those of `generate`, except `streamer`: one value for all, or a list with one value for each prompt (seeds,
            lengths, policies, stores; for options that are lists themselves, such as stop_strings, a list of lists). Texts
            that share a generator draw from it in turn; a seed is used for each text separately.
        on_result: called with (index, result) as soon as a text is complete.
        Returns the results in the order of the prompts. All calls are checked before any runs, with the errors of `generate`.
        Raises BatchError, once all others are complete, if a text fails (with NaN logits, for example).
        """
        if isinstance(prompts, (str, Tensor)):
            raise TypeError("generate_batch takes a list of prompts; for a single one call generate")
        if "messages" in options:
            raise TypeError("generate_batch takes conversations as its prompts: generate_batch([messages, messages])")
        refuse_unknown(options)
        results: list[GenerationResult | None] = [None] * len(prompts)
        errors: dict[int, Exception] = {}
        with closing(completed(check_all(self.check, prompts, options), batch_size)) as ended:
            for index, result in ended:
                if isinstance(result, Exception):
                    errors[index] = result
                    continue
                results[index] = result
                if on_result is not None:
                    on_result(index, result)
        if errors:
            raise BatchError(results, errors)
        return [result for result in results if result is not None]

    def copy_store(self, texts: Iterable[str | list[int] | Tensor]) -> CopyStore:
        """Index texts to copy drafts from once, for `copy_from=store` in any number of calls.

        Raises ValueError or TypeError for anything that is not text or tokens of this model.
        """
        return make_store(texts, self.tokenizer, self.model.vocab_size)

    def engine(self) -> Engine:
        """Make an engine that texts join and leave between rounds (`selfspec.engine.engine`), for servers and your own loops.

        with generator.engine() as engine:
            ticket = engine.add("Once upon a time", max_new_tokens=100)
            while len(engine):
                for progress in engine.step():
                    print(progress.ticket, progress.tokens)
        """
        return Engine(self.check)

    def __repr__(self) -> str:
        model = self.model
        default = self._policies.default
        policy = DEFAULT_POLICY if default is None else getattr(default, "name", default)
        return (
            f"SelfSpecGenerator({model.name or 'a model'}: {model.num_layers} layers, {str(model.dtype)[6:]}, "
            f"{model.device}, policy={policy!r}, runner={self.runner!r})"
        )

    def check(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, **options: Unpack[GenerationOptions]
    ) -> BoundRequest:
        """Check the arguments of one call and bind it to the model as it is now. Nothing has run yet.

        options: those of `generate`, except `streamer`. Others are refused.
        """
        if prompt is not None and messages is not None:
            raise TypeError("give a prompt or messages, not both")
        refuse_unknown(options)
        found = self._bind(
            policy=options.get("policy"),
            exit_layer=options.get("exit_layer"),
            num_speculations=options.get("num_speculations"),
        )
        model = found["bound"].model
        request = make_request(
            model=model,
            defaults=self._models.generation_config,
            prompt=prompt if messages is None else encode_messages(messages, self.tokenizer),
            tokenizer=self.tokenizer,
            options=options,
        )
        if (copy_from := options.get("copy_from")) is not None:
            store = store_for(copy_from, found["policy"], self.tokenizer, model.vocab_size)
            request = replace(request, copy_from=store)
        return BoundRequest(request=request, tokenizer=self.tokenizer, keep_trace=bool(options.get("trace")), **found)

    def check_prepared(
        self, requests: Sequence[Request], **speculation: Unpack[SpeculationOptions]
    ) -> list[BoundRequest]:
        """Bind requests that somebody else has prepared to the model as it is now; `Engine.join` takes them.

        requests: prompt ids, logits processors, stop conditions and random generators, used as they are. All run on one copy
            of the weights. Their results have no text.
        Raises ValueError for a request that exceeds the model's context, an id outside the vocabulary, or a policy that does
        not fit.
        """
        found = self._bind(**speculation)
        model = found["bound"].model
        for request in requests:
            check_ids(request.prompt, model.vocab_size, from_tokenizer=False)
            check_context(request.prompt.numel(), request.stops.max_new_tokens, model.max_positions)
        return [BoundRequest(request=request, tokenizer=None, keep_trace=False, **found) for request in requests]

    def _bind(self, **speculation: Unpack[SpeculationOptions]) -> dict[str, Any]:
        """Bind the model as it is now, and the policy: all of a `BoundRequest` but what a request has of its own."""
        started = perf_counter()
        bound = self._models.bind()
        resolving = perf_counter()
        chosen = self._policies.resolve(bound, **speculation)
        calibrating = perf_counter() - resolving  # which takes time the first time only
        return {"bound": bound, "policy": chosen, "started": started, "calibration_seconds": calibrating}

    def refresh(self) -> None:
        """Take the transformers model's weights as they are now, whether or not they seem to have changed.

        Running calls continue with the old weights if these are copied. Policies keep what they have learned. Kept texts are
        dropped, so call this also after writing to a `LayerSkipModel`'s weights.
        """
        self._models.refresh()

    @property
    def bound(self) -> BoundModel:
        """The model that the next call runs on, unless its weights change before, with its KV caches and pre-verifiers."""
        return self._models.current

    @property
    def model(self) -> LayerSkipModel:
        """The model that the next call runs on, unless its weights change before."""
        return self.bound.model

    @property
    def kept_texts(self) -> KeptTexts:
        """The number of texts kept for reuse, and their memory."""
        return self.bound.pool.kept_texts

    def free_idle_memory(self) -> None:
        """Free the KV cache that waits for the next text, except the rows of kept texts."""
        self.bound.pool.give_back()

    @property
    def runner(self) -> RunnerName:
        """How passes are run: "eager"."""
        return self._models.current.runner

    @property
    def load_preverifier(self) -> PreVerifiers:
        """Loads Pacer's pre-verifiers for the model; for policies by name."""
        return self.bound.preverifiers

    @property
    def policy(self) -> Policy:
        """The policy of calls that name none: "auto" unless another was given."""
        return self._policies.resolve(self.bound)

    def resolve_policy(
        self,
        policy: str | Policy | None = None,
        exit_layer: int | None = None,
        num_speculations: int | None = None,
    ) -> Policy:
        """Return the policy of a call of `generate` with these arguments, with what it has learned so far.

        Raises ValueError as `generate` does.
        """
        return self._policies.resolve(self.bound, policy, exit_layer, num_speculations)


def _show(streamer: Streamer, block: list[int], record: RoundRecord | None) -> None:
    """Give a streamer what a round committed, and the round's record if it wants it. Prefill has no record."""
    on_round = getattr(streamer, "on_round", None)
    if on_round is not None and record is not None:
        on_round(record)
    streamer.put(torch.tensor(block, dtype=torch.long, device="cpu"))
