"""Errors raised at random places inside the engine's steps: do all texts come out as if nothing had happened?

A company of one to four texts is decoded undisturbed. Then the same company is decoded again, and up to three of its steps
are broken off: KeyboardInterrupt, MemoryError or RuntimeError is raised where a function of ours is called or returns, or
where it calls a built-in one or comes back from it. Where the error ends a step, the same engine goes on, at times after a
text was cancelled.

All other texts must have the tokens, keys and values of the undisturbed run, on our own kernels bit for bit. A text
that an error ended by itself, or that was cancelled, must have a beginning of them. Afterwards a new text begins with the
tokens of one that broke off, whose rows it may take over, and must be what a generator without any kept texts makes of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import layerskip_models
import policies
import selfspec
from fuzz_models import CONTEXT
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.sequence import Sequence
from tests.adverse.fuzz_cases import Case, FuzzModel, make_case, make_model, quiet

CASES_PER_MODEL = 12
_ERRORS: tuple[type[BaseException], ...] = (KeyboardInterrupt, KeyboardInterrupt, MemoryError, RuntimeError)
_OURS = tuple(str(Path(package.__file__ or "").parent) for package in (selfspec, layerskip_models, policies))
_CLEANING = frozenset({"__exit__", "close", "leave_captures"})  # Python cannot take these back once they have begun
_UNLEARNING = re.compile(r"ar|ls:[0-9]+-[0-9]+|wave:loop=[0-9]")  # no round depends on what earlier ones were like
_MAX_STEPS = 400


class Fault:
    """Raises errors at some of the events inside `watched`: calls and returns of our functions, and of those they call.

    errors: by the number of the event, or of the next one at which Python can take the call back.
    """

    def __init__(self, errors: dict[int, type[BaseException]] | None = None) -> None:
        self.events, self._errors = 0, sorted((errors or {}).items())
        self.raised: list[type[BaseException]] = []
        self.places: list[str] = []
        """Where errors were raised."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS) or event == "c_exception" or code.co_name == "<genexpr>":
            return
        self.events += 1
        if not self._errors or self.events < self._errors[0][0] or _is_cleaning(frame):
            return
        if code.co_name == "step" and event == "return":  # what it returns would be lost: nobody can go on from there
            return
        _, error = self._errors.pop(0)
        self.raised.append(error)
        self.places.append(f"{error.__name__} at a {event} in {Path(code.co_filename).name}:{frame.f_lineno}")
        raise error(f"a fault, {self.places[-1]}")


def _is_cleaning(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _CLEANING:
            return True
        frame = frame.f_back
    return False


@dataclass(slots=True, kw_only=True, eq=False)
class _Course:
    """What came of one text. rows: of its KV cache at the end, and the hidden states that were kept for its policy."""

    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    ended: bool = False
    cancelled: bool = False
    left: bool = False
    rows: list[Tensor] = field(default_factory=list)


Company = list[tuple[Case, int]]
"""Texts, and the step before which each joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsReport:
    """How a case ended. problem: None if all is well. places: where it was broken off."""

    number: int
    places: list[str]
    problem: str | None = None


def decode(
    model: FuzzModel,
    company: Company,
    fault: Fault,
    after: Callable[[Engine, dict[int, _Course]], None] | None = None,
) -> list[_Course | None]:
    """Every text to its end. after: called when a step was broken off. None for a text that the engine refuses."""
    courses: list[_Course | None] = [None] * len(company)
    texts: dict[int, tuple[_Course, Sequence]] = {}
    with model.engine.engine() as engine:
        for step in range(_MAX_STEPS):
            for index, (case, joins) in enumerate(company):
                if joins == step:
                    with suppress(Exception):  # settings that the engine refuses
                        ticket = engine.add(case.prompt, **case.arguments(model))
                        courses[index] = joined = _Course()
                        texts[ticket] = joined, engine._slots[ticket].sequence
            if not len(engine) and step > max(joins for _, joins in company):
                return courses
            try:
                with fault.watched():
                    found = engine.step()
            except (KeyboardInterrupt, MemoryError, RuntimeError):
                if not fault.places:
                    raise
                for ticket, (course, _) in texts.items():
                    slot = engine._slots.get(ticket)
                    course.left = slot is None or slot._closed  # a text that joins now may take its cache
                if after is not None:
                    after(engine, {ticket: course for ticket, (course, _) in texts.items()})
                continue
            for progress in found:
                course, text = texts[progress.ticket]
                course.tokens += progress.tokens
                course.ended = progress.error is not None or progress.result is not None
                if progress.error is not None:
                    course.error = type(progress.error).__name__
                elif progress.result is not None:
                    told = (progress.result.new_tokens, progress.result.stats.num_new_tokens)
                    if told != (course.tokens, len(course.tokens)):
                        course.error = f"the result tells of {told}, progress of {course.tokens}"
                    if not course.left:
                        end = text.length - 1
                        states = [text.states.rows(layer, 0, end) for layer in text.observes.context_layers]
                        kept = [text.cache.keys.mT[:, :, :end], text.cache.values[:, :, :end], *states]
                        course.rows = [part.clone() for part in kept]
    raise RuntimeError(f"the texts did not end within {_MAX_STEPS} steps")


def _compare(model: FuzzModel, index: int, found: _Course, wanted: _Course, broke: bool) -> str | None:
    about = f"text {index}: {found.tokens} ({found.error}), undisturbed {wanted.tokens} ({wanted.error})"
    alone = found.cancelled or (broke and found.error in ("MemoryError", "RuntimeError"))
    if alone:
        return None if found.tokens == wanted.tokens[: len(found.tokens)] else f"no beginning: {about}"
    if found.error is not None and found.error == wanted.error:  # of the round that fails no token is told
        shorter = min(len(found.tokens), len(wanted.tokens))
        return None if found.tokens[:shorter] == wanted.tokens[:shorter] else f"another text: {about}"
    if (found.tokens, found.error, found.ended) != (wanted.tokens, wanted.error, wanted.ended):
        return f"another text: {about}"
    same = torch.equal if model.bitwise else partial(torch.allclose, atol=1e-8)
    if not all(map(same, found.rows, wanted.rows)):
        return f"other keys, values or hidden states: {about}"
    return None


def make_company(random: Random, model: FuzzModel) -> Company:
    """Draw one. Texts that sample use a policy that learns nothing, so that they must come out the same as well."""
    cases: list[Case] = []
    for _ in range(random.choice([1, 2, 2, 3, 4])):
        case = make_case(random, model)
        if random.random() < 0.15 and case.sample_seed is None:
            case = replace(case, sample_seed=random.randrange(1000))
        if case.sample_seed is not None and not _UNLEARNING.fullmatch(case.policy):
            exit_layer, length = random.randint(1, model.engine.model.num_layers - 1), random.randint(1, 6)
            case = replace(case, policy=random.choice(["ar", f"ls:{exit_layer}-{length}"]))
        cases.append(case)
    return [(case, random.choice([0, 0, 1, 3]) if index else 0) for index, case in enumerate(cases)]


def run_case(random: Random, model: FuzzModel, number: int) -> RoundsReport:
    company = make_company(random, model)
    counting = Fault()
    wanted = decode(model, company, counting)
    last = max(counting.events, 1)
    fault = Fault({random.randint(1, last): random.choice(_ERRORS) for _ in range(random.choice([1, 1, 2, 3]))})
    broken: list[list[int]] = []

    def after(engine: Engine, courses: dict[int, _Course]) -> None:
        going = [ticket for ticket, course in courses.items() if not course.ended and not course.cancelled]
        for ticket in going:
            slot = engine._slots.get(ticket)
            if slot is not None:
                broken.append(slot.sequence.tokens[0, : slot.sequence.length].tolist())
        if going and random.random() < 0.4:
            ticket = random.choice(going)
            courses[ticket].cancelled = True
            engine.cancel(ticket)

    found = decode(model, company, fault, after)
    for index, (one, other) in enumerate(zip(found, wanted)):
        if one is None or other is None:
            continue
        # An exception in processing a draft's row ends that draft, as one of a processor does: others are drawn then.
        if company[index][0].sample_seed is not None and {*fault.raised} - {KeyboardInterrupt}:
            continue
        problem = _compare(model, index, one, other, bool(fault.places))
        if problem is not None:
            return RoundsReport(number=number, places=fault.places, problem=problem)
    if broken:
        text = [*random.choice(broken)[: CONTEXT - 12], random.randrange(model.vocab_size)]
        options: dict[str, Any] = {"max_new_tokens": 8, "policy": random.choice(["ar", "ls:1-3"])}
        following = model.engine.generate(text, **options).new_tokens
        fresh = SelfSpecGenerator(model.engine.model, model.tokenizer, runner="eager")
        if following != fresh.generate(text, **options).new_tokens:
            problem = f"a later text, {text}, came out as {following}"
            return RoundsReport(number=number, places=fault.places, problem=problem)
    return RoundsReport(number=number, places=fault.places)


def _model(seed: int, group: int) -> FuzzModel:
    """One on which texts do not depend on their company: on our own kernels, or in float64."""
    random = Random(f"{seed} model {group}")
    while True:
        model = make_model(random)
        if model.bitwise or model.dtype is torch.float64:
            return model


def trial(seed: int, cases: int, *, first: int = 0) -> list[RoundsReport]:
    """Run cases first .. first + cases - 1; prints failures as they come."""
    torch.set_num_threads(1)
    quiet()
    outcomes: list[RoundsReport] = []
    model, group = None, -1
    for number in range(first, first + cases):
        if model is None or number // CASES_PER_MODEL != group:
            group = number // CASES_PER_MODEL
            model = _model(seed, group)
        try:
            outcome = run_case(Random(f"{seed} case {number}"), model, number)
        except Exception as error:
            outcome = RoundsReport(number=number, places=[], problem=f"{type(error).__name__}: {error}")
        outcomes.append(outcome)
        if outcome.problem is not None:
            print(f"FAILED: {outcome.problem}; {outcome.places}; {model.about}\n    trial({seed}, 1, first={number})")
    return outcomes
