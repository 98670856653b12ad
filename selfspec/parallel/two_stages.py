"""Two stages at once: while layers [E, L) verify drafts, layers [0, E) draft on in another process, as if all were accepted.

Verification of n drafts takes the n rows before them. Draft i is judged by p_i against its kept q. If all are accepted there
is no bonus token: the next draft is there already, and the row that it comes from is verified next. A rejection commits the
correction, and the drafter begins anew behind it; what it drafted ahead is thrown away.
So the output is the model's own, whatever is drafted and when.
Source: SPIDE (2025), Algorithm 1, lines 16 to 40; how far to draft ahead is worked out from measured times instead of tuned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import PicklingError
from time import perf_counter
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

from layerskip_models import LayerSkipModel, load_tokenizer
from layerskip_models.checkpoints.fingerprint import fingerprint_of, probe_tokens
from layerskip_models.exits.folder import check_weights
from layerskip_models.exits.lean import ExitsChoice
from selfspec.generator import Prompt, Streamer
from selfspec.messages import Messages, encode_messages
from selfspec.parallel.drafter_link import DrafterLink, StartMethod
from selfspec.parallel.lead_choice import Lead, LeadChoice
from selfspec.parallel.overlap_timing import LONGEST
from selfspec.parallel.stage_messages import Begin, DraftedRow, Verified, as_tensor, processors_on
from selfspec.parallel.stage_plan import Devices, StagePlan
from selfspec.parallel.verifying_stage import StagedText, VerifyingStage
from selfspec.request import GenerationHost, Request, make_request, refuse_unknown
from selfspec.runtime.torch_mode import engine_mode
from selfspec.stop_conditions import StopConditions, StopReason

Cores = Literal["auto"] | tuple[Sequence[int], Sequence[int]] | None
OPTIONS = (
    "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id",
    "stop_strings",
)  # fmt: skip
"""Fields of a GenerationConfig that `TwoStages.generate` takes as arguments."""
_ARGUMENTS = (
    "prompt", "messages", "seed", "streamer", "logits_processor", "stopping_criteria", "generation_config",
)  # fmt: skip
_CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class StagedStats:
    """What a text took.

    time_to_first_token: seconds from the call on. seconds: behind that token.
    verified: drafts that were judged; thrown_away: drafts that never were.
    draft_seconds, verify_seconds: of a step of each stage, on average; handover_seconds: of telling the other one something.
    lead: (rows, ahead) at the end.
    """

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    time_to_first_token: float = 0.0
    seconds: float = 0.0
    verifications: int = 0
    verified: int = 0
    accepted: int = 0
    thrown_away: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    handover_seconds: float = 0.0
    lead: Lead = (0, 0)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedResult:
    """new_tokens: the generated ids. text: without special tokens, None without a tokenizer."""

    new_tokens: list[int]
    text: str | None
    stop_reason: StopReason
    stats: StagedStats = field(default_factory=StagedStats)


class TwoStages:
    """A checkpoint in two processes: layers [0, exit_layer) in one that drafts, the others here. Used in a `with` statement.

    exit_layer: None for that of the checkpoint's best known fixed setting (`selfspec.defaults`); with adapters, the nearest
        exit that has one.
    devices: of the drafter and of this process. "auto" takes the first two GPUs where there are two, else the CPU for both.
        Hidden states cross through the host's memory.
    dtype, kv_dtype, revision, local_files_only: as in `load_model`; "auto" for each stage on its device. Each stage holds its
        own layers, and both the embedding, the last norm and the head.
    exits: adapters to draft with, as in `load_model`. A folder must have one for exit_layer; those that lie beside the
        checkpoint are used if they do.
    overlap: False lets each stage wait for the other: for comparison. lead: (rows, ahead) to keep to, None to work it out
        from measured times and acceptance: how many drafts a verification waits for, and how many may lie ahead.
    cores: of the drafter and of this process, which is bound to them while the stages are open. "auto": on CPUs half of this
        process's cores for each, if it has two. None: any.
    start: how the drafter's process is started. With "spawn" a script must open the stages under
        `if __name__ == "__main__":`, as always with Python's multiprocessing; "fork" is for CPUs only.
    Raises what `load_model` raises, and ValueError for an exit layer that there is not.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        exit_layer: int | None = None,
        *,
        devices: Devices = "auto",
        dtype: str | torch.dtype = "auto",
        kv_dtype: str | torch.dtype = "auto",
        exits: ExitsChoice = "auto",
        revision: str | None = None,
        local_files_only: bool = False,
        overlap: bool = True,
        lead: Lead | None = None,
        cores: Cores = None,
        start: StartMethod = "spawn",
    ) -> None:
        self.plan = StagePlan.of(
            name_or_path, exit_layer, devices=devices, dtype=dtype, kv_dtype=kv_dtype, exits=exits, revision=revision,
            local_files_only=local_files_only,
        )  # fmt: skip
        if start == "fork" and any(device.type == "cuda" for device in self.plan.devices):
            raise ValueError("a forked process cannot use a GPU: leave out start='fork'")
        self.leads = LeadChoice(lead, overlap)
        self._cores = self.plan.halves() if cores == "auto" else cores
        self._start: StartMethod = start
        self._before: set[int] | None = None
        self._link: DrafterLink | None = None

    def __enter__(self) -> TwoStages:
        own, theirs = (None, None) if self._cores is None else (self._cores[1], self._cores[0])
        self._link = DrafterLink(self.plan.drafting, theirs, self._start)
        try:
            if own is not None:
                self._before = os.sched_getaffinity(0)
                os.sched_setaffinity(0, own)
            self.model: LayerSkipModel = self.plan.verifying.load()
            self.tokenizer = self._load_tokenizer()
            self._verifying = VerifyingStage(self.model)
            self._link.wait_until_loaded()
            self._check_weights(self._link)
            self._handover_seconds = self._link.handover_seconds()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the drafter's process."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._before is not None:
            os.sched_setaffinity(0, self._before)
            self._before = None

    def _load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        try:
            return load_tokenizer(self.plan.name, **self.plan.origin)
        except FileNotFoundError:
            return None

    def _check_weights(self, link: DrafterLink) -> None:
        """ValueError for adapters of another model: neither stage can tell alone."""
        if self.plan.adapters is None or self.plan.drafting.exits is None:
            return
        stops = StopConditions(eos=frozenset(), criteria=StoppingCriteriaList(), max_new_tokens=1)
        probe, bare = probe_tokens(self.model.vocab_size), LogitsProcessorList()
        request = Request(prompt=probe, processors=bare, stops=stops, generator=None)
        with self._at_work():
            _, logits = self._read_prompt(link, request, None)
        link.finish()
        check_weights(self.plan.adapters, fingerprint_of(logits[0]), self.plan.name, self.plan.drafting.exits)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        seed: int | None = None,
        streamer: Streamer | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Any,
    ) -> StagedResult:
        """Continue a prompt, or answer messages; arguments as in `SelfSpecGenerator.generate`. options: those in `OPTIONS`.

        seed: of the sampling. The random numbers at a position are its own, however much was drafted ahead of it and thrown
        away, so a seed repeats a text whatever the timing. (But for rounding: on PyTorch's operators the last digits of p
        depend on how many rows are verified together.) Another exit layer draws another text of the same law.
        streamer: gets the prompt's ids and then what each verification committed.
        logits_processor: goes to the process that drafts, too, so it must be possible to pickle it.
        Raises ValueError or TypeError as `SelfSpecGenerator.generate` does, NonFiniteLogitsError for NaN logits, and
        DrafterError (a RuntimeError) if the drafter has ended. After any error but this one the stages take the next text.
        """
        called = perf_counter()
        if self._link is None:
            raise RuntimeError("the stages are not open: use them in a with statement, with TwoStages(...) as stages")
        if prompt is not None and messages is not None:
            raise TypeError("give a prompt or messages, not both")
        refuse_unknown(options.keys() - {*OPTIONS}, [*_ARGUMENTS, *OPTIONS])
        request = make_request(
            host=GenerationHost(self.model.config, self.model.generation_config, self.model.device),
            prompt=prompt if messages is None else encode_messages(messages, self.tokenizer),
            tokenizer=self.tokenizer, generation_config=generation_config, options=options, seed=seed, generator=None,
            logits_processor=logits_processor, stopping_criteria=stopping_criteria,
        )  # fmt: skip
        stats = StagedStats(num_prompt_tokens=request.prompt.numel(), handover_seconds=self._handover_seconds)
        try:
            if streamer is not None:
                streamer.put(request.prompt.clone())
            with self._at_work():
                text, committed = self._begin(self._link, request)
            stats.time_to_first_token = perf_counter() - called
            if streamer is not None:
                streamer.put(torch.tensor(committed, dtype=torch.long, device="cpu"))
            while text.stop_reason is None:
                with self._at_work():
                    committed = self._verify(self._link, text, stats)
                if streamer is not None:
                    streamer.put(torch.tensor(committed, dtype=torch.long, device="cpu"))
            stats.thrown_away += len(text.waiting)
        finally:
            # What the drafter sent before it heard of the end would be taken for the next text's.
            stats.thrown_away += self._link.finish()
            if streamer is not None:
                streamer.end()
        stats.seconds = perf_counter() - called - stats.time_to_first_token
        stats.num_new_tokens = text.num_new
        new = text.tokens[0, request.prompt.numel() : text.length].tolist()
        words = None if self.tokenizer is None else self.tokenizer.decode(new, skip_special_tokens=True)
        assert words is None or isinstance(words, str)
        return StagedResult(new_tokens=new, text=words, stop_reason=text.stop_reason, stats=stats)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The state of PyTorch for this stage's passes; streamers run in the caller's."""
        with engine_mode(self.model.device), self.model.on_one_team():
            yield

    def _begin(self, link: DrafterLink, request: Request) -> tuple[StagedText, list[int]]:
        """The prompt through both stages, and the first token."""
        seed, source = None, request.generator
        if source is not None:  # the drafts' random numbers are others than those that judge them
            seed = int(torch.randint(2**62, (1,), generator=source, device=source.device))
        text, logits = self._read_prompt(link, request, seed)
        token = text.sampler.next_token(logits, text.tokens, text.length)
        committed = text.commit([token])
        self._tell(link, text, 0, token)
        return text, committed

    def _read_prompt(self, link: DrafterLink, request: Request, seed: int | None) -> tuple[StagedText, Tensor]:
        """A text whose prompt both stages have read, and the logits behind it, [1, vocab]."""
        model, num_prompt = self.model, request.prompt.numel()
        begin = Begin(
            prompt=request.prompt.tolist(),
            max_length=num_prompt + request.stops.max_new_tokens,
            processors=processors_on(request.processors, _CPU),
            seed=seed,
        )
        try:
            link.send(begin)
        except (PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                "a logits processor cannot be sent to the process that drafts: make it an object of a class that is defined "
                f"at the top of a module ({error})"
            ) from error
        text = StagedText(model, request)
        logits: Tensor | None = None
        while text.cache.length < num_prompt:
            states = link.receive(None)
            assert isinstance(states, np.ndarray)
            logits = self._verifying.read(text, as_tensor(states, model.dtype, model.device))
        assert logits is not None
        return text, logits

    def _verify(self, link: DrafterLink, text: StagedText, stats: StagedStats) -> list[int]:
        """Judge what is there of drafts, tell the drafter, and return what was committed."""
        wanted = min(text.lead[0], text.left)
        while len(text.waiting) < wanted or (len(text.waiting) < LONGEST and link.has_message()):
            row = link.receive()
            assert isinstance(row, DraftedRow)
            if row.rejections == text.rejections:
                text.waiting.append(row)
                self.leads.note_draft(row.seconds)
            else:
                stats.thrown_away += 1
        started = perf_counter()
        judged = self._verifying.judge(text, text.waiting[: min(text.left, LONGEST)])
        block = [row.token for row in text.waiting[: judged.accepted]]
        text.waiting = text.waiting[judged.rows :]
        if judged.token is not None:
            block.append(judged.token)
            stats.thrown_away += len(text.waiting)
            text.waiting = []
        committed = text.commit(block, judged.failure)
        if text.stop_reason is None:
            self._tell(link, text, judged.accepted, judged.token)
        seconds = perf_counter() - started
        self.leads.note_verification(judged.rows, judged.accepted, seconds)
        stats.verifications += 1
        stats.verified += judged.rows
        stats.accepted += judged.accepted
        stats.verify_seconds += (seconds - stats.verify_seconds) / stats.verifications
        stats.draft_seconds, stats.lead = self.leads.draft_seconds, text.lead
        return committed

    def _tell(self, link: DrafterLink, text: StagedText, accepted: int, token: int | None) -> None:
        """The drafter hears what became of its drafts, and how far to draft from now on."""
        text.rejections += token is not None
        text.lead = self.leads.lead
        link.send(Verified(accepted, token, self.leads.most_waiting(text.lead)))
