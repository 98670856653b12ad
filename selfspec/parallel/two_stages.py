"""Two stages at once: while layers [E, L) verify drafts, layers [0, E) draft on in another process, as if all were accepted.

Verification of n drafts takes the n rows before them. Draft i is judged by p_i against its kept q. If all are accepted there
is no bonus token: the next draft is there already, and the row that it comes from is verified next. A rejection commits the
correction, and the drafter begins anew behind it; what it drafted ahead is thrown away with its random numbers.
So the output is the model's own, whatever is drafted and when.
Source: SPIDE (2025), Algorithm 1, lines 16 to 40; how far to draft ahead is worked out from measured times instead of tuned.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from layerskip_models import LayerSkipModel, load_tokenizer
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.loading import load_config
from layerskip_models.kernels.native_steps import STEP_ROWS, NativeSteps
from layerskip_models.kv_cache import KVCache
from layerskip_models.parallel.shard_loading import load_layers
from policies import check_exit_layer
from selfspec.accept import residual
from selfspec.judge import judge_choices
from selfspec.parallel.drafting_stage import (
    OVER,
    OVER_ASKED,
    Begin,
    DraftedRow,
    End,
    Verified,
    run_drafting_stage,
)
from selfspec.parallel.overlap_timing import LONGEST, Stages, best_lead
from selfspec.request import GenerationHost, Request, make_request
from selfspec.runtime.torch_mode import engine_mode
from selfspec.sampling import Sampler
from selfspec.stop_conditions import StopReason

_RECONSIDERED = 24  # verifications between two looks at how far to draft ahead
_START = 0.7  # acceptance that is assumed before any is known
_FIRST_LEAD = (2, 2)
_PINGS = 21
_WAIT_SECONDS = 120.0


@dataclass(slots=True, kw_only=True)
class StagedStats:
    """What a text took. seconds: behind the prompt. verified: drafts that were judged; thrown_away: drafts that never were.

    draft_seconds, verify_seconds: of a step of each stage, on average; handover_seconds: of telling the other one something.
    lead: (rows, ahead) at the end.
    """

    seconds: float = 0.0
    verifications: int = 0
    verified: int = 0
    accepted: int = 0
    thrown_away: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    handover_seconds: float = 0.0
    lead: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedResult:
    """new_tokens: the generated ids. text: without special tokens, None without a tokenizer."""

    new_tokens: list[int]
    text: str | None
    stop_reason: StopReason
    stats: StagedStats


@dataclass(slots=True, eq=False)
class _Text:
    """A text while it is decoded. lead: that the drafter was told of last. rows: of drafts that were not judged yet."""

    request: Request
    sampler: Sampler
    tokens: Tensor  # int64 [1, capacity]
    length: int
    cache: KVCache
    lead: tuple[int, int]
    num_new: int = 0
    rejections: int = 0
    rows: list[DraftedRow] = field(default_factory=list)
    stats: StagedStats = field(default_factory=StagedStats)
    stop_reason: StopReason | None = None


class TwoStages:
    """A checkpoint in two processes: layers [0, exit_layer) in one that drafts, the others here. Used in a `with` statement.

    overlap: False lets each stage wait for the other: for comparison. lead: (rows, ahead) to keep to, None to work it out
    from measured times and acceptance: how many drafts a verification waits for, and how many may lie ahead.
    cores: of the drafter and of this process, which is bound to them while the stages are open; None for any.
    start: how the drafter's process is started. Exits are bare: adapters are not drafted with here.
    Raises what `load_model` raises, and ValueError for an exit layer that there is not.
    """

    def __init__(
        self,
        name_or_path: str | Path,
        exit_layer: int,
        *,
        dtype: str | torch.dtype = "auto",
        overlap: bool = True,
        lead: tuple[int, int] | None = None,
        cores: tuple[Sequence[int], Sequence[int]] | None = None,
        start: Literal["spawn", "fork"] = "spawn",
    ) -> None:
        self._name = resolve_checkpoint(name_or_path)
        self._config = load_config(self._name)
        check_exit_layer(exit_layer, self._config.num_hidden_layers)
        if lead is not None and not (1 <= lead[0] <= LONGEST and lead[1] >= 1):
            raise ValueError(f"lead must be (rows, ahead), rows in [1, {LONGEST}] and ahead at least 1, got {lead}")
        self._exit_layer, self.overlap, self.lead = exit_layer, overlap, lead
        self._options: dict[str, Any] = {"dtype": dtype, "device": "cpu"}
        self._cores, self._start = cores, start
        self._before: set[int] | None = None
        self._draft_seconds = 0.0
        self._seen = 0  # verifications
        self._chosen = _FIRST_LEAD
        self._times: dict[int, float] = {}  # seconds of verifications, by their rows
        self._acceptance = _START

    def __enter__(self) -> TwoStages:
        context = multiprocessing.get_context(self._start)
        self._connection, theirs = context.Pipe()
        if self._cores is not None:
            self._before = os.sched_getaffinity(0)
        drafter = None if self._cores is None else self._cores[0]
        self._process = context.Process(  # type: ignore[attr-defined]
            target=run_drafting_stage,
            args=(theirs, self._name, self._exit_layer, self._options, drafter),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores[1])
        try:
            layers = range(self._exit_layer, self._config.num_hidden_layers)
            self.model: LayerSkipModel = load_layers(self._name, layers, **self._options)
            self.tokenizer = self._load_tokenizer()
            self._steps: NativeSteps | None = self.model.steps()
            error = self._receive()
            if isinstance(error, Exception):
                raise error
            self._handover_seconds = self._measure_handover()
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
        with suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
        if self._before is not None:
            os.sched_setaffinity(0, self._before)
            self._before = None

    def _load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        try:
            return load_tokenizer(self._name)
        except FileNotFoundError:
            return None

    def generate(
        self,
        prompt: str | list[int] | Tensor,
        *,
        seed: int | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Any,
    ) -> StagedResult:
        """Continue a prompt. options: fields of a GenerationConfig (max_new_tokens, do_sample, temperature, ...).

        Raises ValueError as `SelfSpecGenerator.generate` does, and RuntimeError if the drafter has ended.
        """
        model = self.model
        request = make_request(
            host=GenerationHost(self._config, model.generation_config, model.device),
            prompt=prompt, tokenizer=self.tokenizer, generation_config=generation_config, options=options, seed=seed,
            generator=None, logits_processor=None, stopping_criteria=None,
        )  # fmt: skip
        with engine_mode(model.device), model.on_one_team():
            text = self._begin(request)
            started = perf_counter()
            try:
                while text.stop_reason is None:
                    self._verify(text)
            finally:
                self._send(End())
                self._drain(text)
            text.stats.seconds = perf_counter() - started
        new = text.tokens[0, request.prompt.numel() : text.length].tolist()
        words = None if self.tokenizer is None else self.tokenizer.decode(new, skip_special_tokens=True)
        assert words is None or isinstance(words, str)
        return StagedResult(new_tokens=new, text=words, stop_reason=text.stop_reason, stats=text.stats)

    def _begin(self, request: Request) -> _Text:
        """The prompt through both stages, and the first token."""
        model, prompt = self.model, request.prompt
        num_prompt, total = prompt.numel(), prompt.numel() + request.stops.max_new_tokens
        sampler = Sampler(request.processors, request.generator)
        seed = None
        if sampler.do_sample:  # the drafts' random numbers are others than those that judge them
            seed = int(torch.randint(2**62, (1,), generator=request.generator))
        lead = self._lead()
        self._send(
            Begin(prompt=prompt.tolist(), max_length=total, processors=request.processors, seed=seed, ahead=sum(lead))
        )
        tokens = torch.zeros(1, total + LONGEST + 1, dtype=torch.long)
        text = _Text(request, sampler, tokens, num_prompt, KVCache(model, total + LONGEST), lead)
        text.tokens[0, :num_prompt] = prompt
        states = self._receive()
        assert isinstance(states, np.ndarray)
        hidden = model.run_layers(torch.from_numpy(states), 0, model.num_layers, text.cache)
        token = self._pick(text, model.logits(hidden[-1:]))
        self._commit(text, [token])
        self._send(Verified(0, token, self._ahead(*lead)))
        text.rejections = 1
        return text

    def _pick(self, text: _Text, logits: Tensor) -> int:
        """The first token."""
        if text.sampler.do_sample:
            p = text.sampler.probabilities(logits, text.tokens, text.length)[0]
            return text.sampler.draw(p, "the first token")
        return int(text.sampler.process(logits, text.tokens, text.length)[0].argmax())

    def _verify(self, text: _Text) -> None:
        """Judge what is there of drafts, and tell the drafter."""
        left = text.request.stops.max_new_tokens - text.num_new
        wanted = min(text.lead[0], left)
        while len(text.rows) < wanted or (self._connection.poll() and len(text.rows) < LONGEST):
            row = self._receive()
            assert isinstance(row, DraftedRow)
            if row.rejections == text.rejections:
                text.rows.append(row)
                self._note_draft(row.seconds)
            else:
                text.stats.thrown_away += 1
        count = min(len(text.rows), left, LONGEST)
        judged, text.rows = text.rows[:count], text.rows[count:]
        started = perf_counter()
        drafts = [row.token for row in judged]
        text.tokens[0, text.length : text.length + count] = torch.tensor(drafts)
        accepted, token = self._judge(text, judged, drafts)
        block = drafts[:accepted] if token is None else [*drafts[:accepted], token]
        if token is not None:
            text.rejections += 1
            text.stats.thrown_away += len(text.rows)
            text.rows = []
        self._commit(text, block)
        if text.stop_reason is None:
            text.lead = self._lead()
            self._send(Verified(accepted, token, self._ahead(*text.lead)))
        self._note(text, count, accepted, perf_counter() - started)

    def _judge(self, text: _Text, judged: list[DraftedRow], drafts: list[int]) -> tuple[int, int | None]:
        """How many drafts hold, and the token in the place of the first that does not, None if all do."""
        model, sampler = self.model, text.sampler
        x = torch.from_numpy(np.stack([row.hidden for row in judged]))
        rows = ((text.cache, len(judged)),)
        greedy = not sampler.do_sample and not sampler.processors
        if self._steps is not None and greedy and len(judged) <= STEP_ROWS:
            chosen, values = self._steps.rows(x.contiguous(), rows, 0, model.num_layers)
            verdict = judge_choices(chosen, values, text.length, drafts[:-1])
            if verdict.failure is not None:
                raise verdict.failure
            accepted = verdict.num_accepted + (verdict.block[-1] == drafts[verdict.num_accepted])
            return accepted, None if accepted == len(drafts) else verdict.block[-1]
        logits = model.logits(model.run_layers(x, 0, model.num_layers, rows))
        for index, (row, draft) in enumerate(zip(judged, drafts)):
            scores = sampler.process(logits[index : index + 1], text.tokens, text.length + index)[0]
            if not sampler.do_sample:
                token = int(scores.argmax())
                if token != draft:
                    return index, token
                continue
            assert row.q is not None
            p, q = scores.softmax(dim=-1), torch.from_numpy(row.q)
            uniform = sampler.uniforms(1, p.device)[0]
            if not bool(uniform * q[draft] < p[draft]):
                return index, sampler.draw(residual(p, q), f"position {text.length + index}")
        return len(drafts), None

    def _commit(self, text: _Text, block: list[int]) -> None:
        text.tokens[0, text.length : text.length + len(block)] = torch.tensor(block)
        count, text.stop_reason = text.request.stops.first_stop(block, text.tokens, text.length, text.num_new)
        text.length += count
        text.num_new += count
        text.cache.roll_back(text.length - 1)

    def _lead(self) -> tuple[int, int]:
        return self.lead or self._chosen

    def _ahead(self, rows: int, ahead: int) -> int:
        """Drafts that may wait: without overlap those that a verification takes, and no more until it is over."""
        return rows + ahead if self.overlap else rows

    def _note_draft(self, seconds: float) -> None:
        if seconds:
            self._draft_seconds += 0.05 * (seconds - self._draft_seconds) if self._draft_seconds else seconds

    def _note(self, text: _Text, count: int, accepted: int, seconds: float) -> None:
        """Learn from a verification."""
        stats = text.stats
        stats.verifications += 1
        stats.verified += count
        stats.accepted += accepted
        before = self._times.get(count, seconds)
        self._times[count] = before + 0.2 * (seconds - before)
        weight = accepted + (accepted < count)
        self._acceptance += 0.02 * weight * (accepted / weight - self._acceptance)
        stats.draft_seconds, stats.lead = self._draft_seconds, self._lead()
        stats.verify_seconds += (seconds - stats.verify_seconds) / stats.verifications
        self._seen += 1
        stats.handover_seconds = self._handover_seconds
        if self.lead is None and self._seen % _RECONSIDERED == 0 and self._draft_seconds:
            self._chosen = best_lead_of(self._draft_seconds, _rising(self._times), self._acceptance)

    def _drain(self, text: _Text) -> None:
        """What the drafter sent before it heard of the end would be taken for the next text's."""
        text.stats.thrown_away += len(text.rows)
        self._send(OVER_ASKED)
        while self._receive() != OVER:
            text.stats.thrown_away += 1

    def _measure_handover(self) -> float:
        """Seconds, one way."""
        times = []
        for _ in range(_PINGS):
            started = perf_counter()
            self._send(OVER_ASKED)
            self._receive()
            times.append(perf_counter() - started)
        return sorted(times)[_PINGS // 2] / 2

    def _send(self, said: object) -> None:
        try:
            self._connection.send(said)
        except OSError as error:
            raise RuntimeError("the process that drafts has ended: open the stages again") from error

    def _receive(self) -> object:
        try:
            if not self._connection.poll(_WAIT_SECONDS):
                raise RuntimeError(f"the process that drafts has not answered for {_WAIT_SECONDS:.0f} seconds")
            found: object = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the process that drafts has ended: open the stages again") from error
        return found


def best_lead_of(draft: float, verify: Sequence[float], acceptance: float) -> tuple[int, int]:
    """`best_lead` for seconds of a draft step, and of verifications of 1, 2, .. rows.

    Remembered for times and an acceptance that are nearly alike, since trying all leads takes as long as some rounds.
    """
    few, many = verify[0] / draft, verify[-1] / verify[0]
    return _best_lead_near(round(4 * log2(few)), round(4 * log2(many)), len(verify), round(acceptance, 1))


@lru_cache(maxsize=1024)
def _best_lead_near(few: int, many: int, rows: int, acceptance: float) -> tuple[int, int]:
    """few, many: in quarters of a power of two, what one row costs in draft steps, and all rows in single ones."""
    first, last = 2 ** (few / 4), 2 ** ((few + many) / 4)
    verify = tuple(first + (last - first) * row / max(rows - 1, 1) for row in range(rows))
    return best_lead(Stages(draft=1.0, verify=verify, catch_up=0.0), acceptance)


def _rising(times: dict[int, float]) -> tuple[float, ...]:
    """Seconds of 1, 2, .. rows from those of some numbers of rows: never less than for fewer."""
    rows = sorted(times)
    found, most = [], 0.0
    for count in range(1, rows[-1] + 1):
        nearest = min(rows, key=lambda one: abs(one - count))
        most = max(most, times[nearest])
        found.append(most)
    return tuple(found)
