"""Generated calls against transformers: does the engine do exactly what the model's own `generate` does?

    python -m tests.adverse.fuzz --cases 10000 --seed 0   # minutes
    python -m tests.adverse.fuzz --seed 0 --case 4711     # one of them again, in full

Greedy texts must be equal in float64. In float32 they may part where transformers' own two best logits are closer than
`NEAR_TIE_LOGIT_GAPS` (`selfspec.analysis.comparison`), or closer than their own rounding moves them, which is more in a
model of a few numbers a row. Such near-ties are counted. On our own kernels every text must also equal plain decoding's,
near-ties included. Where transformers raises an exception the engine may do so; where transformers
goes on, the engine must, except where transformers' scores are NaN: it then takes token 0, and the engine raises. Sampled
texts are drawn twice from one seed and must be the same. Random models of 20 cases each.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.analysis.comparison import NEAR_TIE_LOGIT_GAPS, first_difference
from selfspec.engine.sampling import NonFiniteLogitsError
from tests.adverse.fuzz_cases import Case, FuzzModel, make_case, make_model, quiet

CASES_PER_MODEL = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """How a case ended. kind: one of those that `_check` names; failures begin with "FAILED"."""

    number: int
    kind: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind.startswith("FAILED")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What one engine answered: new tokens, or the exception it raised. gaps: between the two best logits of each step."""

    tokens: list[int]
    error: str | None = None
    gaps: tuple[float, ...] = ()


def _reference(model: FuzzModel, case: Case) -> _Said:
    ids = torch.tensor([case.prompt])
    try:
        out: Any = model.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=case.config(output_scores=True, return_dict_in_generate=True),
            tokenizer=model.tokenizer,
            **case.lists(),
        )
    except Exception as error:
        return _Said(tokens=[], error=type(error).__name__)
    best = [step[0].topk(2).values.tolist() for step in out.scores]
    return _Said(
        tokens=out.sequences[0, len(case.prompt) :].tolist(), gaps=tuple(first - second for first, second in best)
    )


def _engine(model: FuzzModel, case: Case) -> _Said:
    try:
        result = model.engine.generate(case.prompt, **case.arguments(model))
    except Exception as error:
        return _Said(tokens=[], error=f"{type(error).__name__}: {error}")
    return _Said(tokens=result.new_tokens)


def _with_stop(model: FuzzModel, case: Case) -> Case:
    """The case with its stop, which is part of what the model says without one (the engine is asked, being faster)."""
    if case.stop is None:
        return case
    kind, position = case.stop
    text = _engine(model, replace(case, policy="ar", sample_seed=None)).tokens
    if not text:
        return case
    at = min(position, len(text) - 1)
    if kind == "eos":
        return replace(case, options={**case.options, "eos_token_id": [text[at], model.vocab_size - 1]})
    word = model.tokenizer.decode(text[max(0, at - 1) : at + 1])
    return replace(case, options={**case.options, "stop_strings": [word]})


def rounding(reference: PreTrainedModel, text: list[int]) -> float:
    """How far the logits that follow a text are from those that the same weights give in float64, at most."""
    ids = torch.tensor([text])
    with torch.no_grad():
        given = reference(ids).logits[0, -1].double()
        exact = copy.deepcopy(reference).double()(ids).logits[0, -1]
    return float((given - exact).abs().max())


def check(model: FuzzModel, case: Case) -> tuple[str, str]:
    """(kind of outcome, detail) of one case."""
    case = _with_stop(model, case)
    ours = _engine(model, case)
    if case.sample_seed is not None:
        again = _engine(model, case)
        if again != ours:
            return "FAILED: a seed gave two texts", f"{ours} and {again}"
        plain = _engine(model, replace(case, policy="ar"))
        if ours.error and not plain.error and not case.masks_by_text:
            return "FAILED: raised, where plain decoding goes on", ours.error
        return ("sampled, raised" if ours.error else "sampled"), ""
    if model.bitwise and case.policy != "ar":
        plain = _engine(model, replace(case, policy="ar"))
        if plain.tokens != ours.tokens or (plain.error is None) != (ours.error is None):
            return "FAILED: not plain decoding's text", f"{ours}, plain {plain}"
    theirs = _reference(model, case)
    if theirs.error:
        return ("both raised" if ours.error else "only transformers raised"), theirs.error
    if ours.error and ours.error.startswith(NonFiniteLogitsError.__name__) and any(gap != gap for gap in theirs.gaps):
        return "NaN refused", ours.error
    if ours.error:
        return "FAILED: raised, where transformers goes on", f"{ours.error}; transformers: {theirs.tokens}"
    at = first_difference(theirs.tokens, ours.tokens)
    if at is None:
        return "equal", ""
    detail = f"transformers {theirs.tokens}, selfspec {ours.tokens}"
    if at == len(theirs.tokens) or at == len(ours.tokens):
        return "FAILED: another stop", detail
    bound = NEAR_TIE_LOGIT_GAPS[model.engine.model.dtype]
    if not theirs.gaps[at] <= max(bound, 2 * rounding(model.reference, case.prompt + theirs.tokens[:at])):
        return "FAILED: another token", f"{detail}; the best logits are {theirs.gaps[at]:.3g} apart at {at}"
    return "near-tie", f"{theirs.gaps[at]:.3g}"


def run_model(seed: int, group: int, numbers: Iterable[int]) -> list[CaseResult]:
    model = make_model(Random(f"{seed} model {group}"))
    cases = {number: make_case(Random(f"{seed} case {number}"), model) for number in numbers}
    found = {number: check(model, case) for number, case in cases.items()}
    return [CaseResult(number=number, kind=kind, detail=detail) for number, (kind, detail) in found.items()]


def _prepare() -> None:
    """One thread, since the matrices are tiny."""
    torch.set_num_threads(1)
    quiet()


def fuzz(seed: int, cases: int) -> list[CaseResult]:
    """Run this number of cases, and print failures as they come."""
    outcomes: list[CaseResult] = []
    for first in range(0, cases, CASES_PER_MODEL):
        for outcome in run_model(seed, first // CASES_PER_MODEL, range(first, min(first + CASES_PER_MODEL, cases))):
            outcomes.append(outcome)
            if outcome.failed:
                again = f"python -m tests.adverse.fuzz --seed {seed} --case {outcome.number}"
                print(f"{outcome.kind}: {outcome.detail}\n    {again}", flush=True)
    return outcomes


def summary(outcomes: list[CaseResult]) -> str:
    count = Counter(outcome.kind for outcome in outcomes)
    kinds = ", ".join(f"{kind}: {number}" for kind, number in sorted(count.items()))
    return f"{len(outcomes)} cases, {sum(outcome.failed for outcome in outcomes)} failed ({kinds})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.adverse.fuzz", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--cases", type=int, default=1000, help="How many (default 1000).")
    parser.add_argument("--seed", type=int, default=0, help="Random seed (default 0).")
    parser.add_argument("--case", type=int, help="Repeat one case and describe it.")
    given = parser.parse_args(arguments)
    _prepare()
    if given.case is not None:
        group = given.case // CASES_PER_MODEL
        model = make_model(Random(f"{given.seed} model {group}"))
        case = _with_stop(model, make_case(Random(f"{given.seed} case {given.case}"), model))
        print(f"model: {model.about}\n{case}")
        print(f"transformers: {_reference(model, case)}\nselfspec: {_engine(model, case)}")
        print(f"plain: {_engine(model, replace(case, policy='ar'))}")
        [outcome] = run_model(given.seed, group, [given.case])
        print(f"{outcome.kind} {outcome.detail}")
        return int(outcome.failed)
    started = time.monotonic()
    outcomes = fuzz(given.seed, given.cases)
    print(f"{summary(outcomes)}, seed {given.seed}, {time.monotonic() - started:.0f} s")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
