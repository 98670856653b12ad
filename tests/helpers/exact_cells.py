"""The cells of the exactness matrix, and the one check that each of them is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, islice, product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from transformers import GenerationConfig

import selfspec.engine.engine
from batched_runs import BATCH_SENSITIVE, SCRIPTED, Course, Wish, assert_same, run_alone, run_together
from layerskip_models import LayerSkipModel
from layerskip_models.draft_vocabulary import DraftTokens
from layerskip_models.families import FAMILIES
from looped_models import LOOPED
from matrix_models import (
    DRAFT_HEAD,
    FLOATS,
    NONE,
    NUM_LAYERS,
    VARIANTS,
    WEIGHTS,
    exists,
    kernels_of,
    model_of,
    source_of,
)
from scripted_policies import EVERY_POLICY, WAVES, first_of_each
from selfspec import SelfSpecGenerator
from selfspec.serve.processors import Stops, TrimmedText
from tiny_llama import VOCAB_SIZE, reference_greedy, tiny_tokenizer

SEED = 52
TRIES = 150  # at finding rows that may be
ATTEMPTS = 10  # completions of a pair, of which the one with most new pairs is taken
NEW_TOKENS = 18
NEAR_TIE = 1e-3
"""Of a float32 model on operators: logits that two orders of summation may swap."""
ROUNDED_ROWS = ("int4", "Q4_0", "Q4_K_M", "Q5_K", "Q6_K")
"""Weights that meet rows of 8 bits unless 16 are asked for."""
EIGHT_BITS = ("int8", "Q8_0", "Q4_K_M", "Q5_K", "Q6_K")
"""Weights of which some or all have more than 4 bits and none more than 8, so that they can draft in 4."""
BITS = (
    "bits:8-3", "bits:4-4", "bits:4-3,layer=2", "bits:8-3,layer=1", "bits:4-6+dv", "bits:8-6+svip", "bits:4-6+adaedl",
    "bits:8-6+spide", "bits:4-6+fs",
)  # fmt: skip
"""Drafts with the weights rounded to fewer bits."""
POLICIES = ("ar", *SCRIPTED, *EVERY_POLICY, *BITS, *WAVES)
FIRST_POLICIES = first_of_each(POLICIES)
FIRST_WEIGHTS = ("float64", "float32", "bfloat16", DRAFT_HEAD, "int8", "int4", "Q8_0", "Q4_K_M")
MODES = ("greedy", "seeded", "one choice")
"""Greedy, sampled, and sampled where processors leave one token: then the text is the greedy one."""
SETTINGS: dict[str, dict[str, Any]] = {
    "length": {},
    "eos": {},
    "stop string": {},
    "penalty": {"repetition_penalty": 1.3},
    "lists": {"no_repeat_ngram_size": 3, "suppress_tokens": [2, 5]},
    "bias": {"sequence_bias": [[[3], 2.0], [[7], -3.0]], "min_new_tokens": 6, "eos_token_id": [3, 9]},
}
FEW = (9, 2, 7)
"""Tokens that drafts may choose, in an order of their own. So each text's own tokens matter to its drafts."""
COMPANY = (
    Wish(prompt=[5, 1, 7], policy="ls:{E}-4", exit_layer=1, options={"max_new_tokens": 14}),
    Wish(prompt=[2, 9] * 7, policy="dv:{E}", exit_layer=3, options={"max_new_tokens": 9, "do_sample": True, "seed": 3}),
    Wish(prompt=[11], policy="copy:4", exit_layer=2, options={"max_new_tokens": 14}, joins=4),
)  # fmt: skip


class Cell(NamedTuple):
    """One combination. kv_dtype: of keys and values. exit_layer: what {E} in the policy stands for. rows: None for 8 bits.

    vocabulary: that drafts choose among, besides their text's own tokens; None for all.
    """

    family: str
    weights: str
    variant: str
    kv_dtype: str
    policy: str
    exit_layer: int
    mode: str
    company: str
    settings: str
    rows: int | None = None
    vocabulary: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """As part of a test's id."""
        small = ["small keys"] * (self.kv_dtype != "auto") + [f"rows {self.rows}"] * (self.rows is not None)
        small += ["few tokens"] * (self.vocabulary is not None)
        return " ".join(
            [self.family, self.weights, self.variant, *small, self.policy.format(E=self.exit_layer), self.mode,
             self.company, self.settings]
        )  # fmt: skip

    @property
    def bitwise(self) -> bool:
        """Whether a row has the same bits in any company: on our own kernels."""
        return self.variant != NONE

    @property
    def varies(self) -> bool:
        """Whether the policy may decide otherwise in a batch."""
        looped = self.family in LOOPED and self.policy.startswith("auto")  # it is asked where rounds end
        return looped or self.policy in BATCH_SENSITIVE

    @property
    def model(self) -> LayerSkipModel:
        """Within `kernels_of` the variant."""
        model = model_of(self.family, self.weights, self.variant).with_kv_dtype(self.kv_dtype)
        model = model if self.rows is None else model.with_rows(self.rows)
        few = self.vocabulary
        return model if few is None else model.with_draft_vocabulary(DraftTokens(few))


COLUMNS: dict[str, Sequence[Any]] = {
    "family": [*FAMILIES],
    "weights": WEIGHTS,
    "variant": VARIANTS,
    "kv_dtype": ("auto", "bfloat16"),
    "policy": POLICIES,
    "exit_layer": range(1, NUM_LAYERS),
    "mode": MODES,
    "company": ("alone", "in company"),
    "settings": [*SETTINGS],
    "rows": (None, 16),
    "vocabulary": (None, FEW),
}


def possible(cell: Sequence[Any]) -> bool:
    """Whether there is such a cell."""
    cell = Cell(*cell)
    if not exists(cell.family, cell.weights, cell.variant):
        return False
    if cell.rows is not None and cell.weights not in ROUNDED_ROWS:
        return False
    if cell.kv_dtype != "auto" and not cell.bitwise:
        return False  # on operators company changes last digits, and rounding makes more of them
    if "bits:" in cell.policy and not (
        cell.bitwise and (cell.weights in FLOATS or ("bits:4" in cell.policy and cell.weights in EIGHT_BITS))
    ):
        return False  # nothing multiplies with them, or there is nothing to gain
    if cell.policy in WAVES and cell.family not in LOOPED:
        return False
    if cell.varies and cell.mode == "seeded" and cell.company != "alone":
        return False  # drafts otherwise in a batch, where a row costs less: sampled text is then drawn otherwise
    # Processors move logits, and with them near-ties.
    return cell.bitwise or cell.weights == "float64" or not SETTINGS[cell.settings]


def covering(columns: Mapping[str, Sequence[Any]], seed: int) -> list[Sequence[Any]]:
    """Possible rows in which any two values of two columns that can meet do so; the same for the same seed.

    A pair that no completion was found for is left out: `test_matrix` compares what is covered with the full table.
    """
    random, values = Random(seed), [*columns.values()]
    wanted = {
        ((left, a), (right, b)): None  # in this order
        for left, right in combinations(range(len(values)), 2)
        for a, b in product(values[left], values[right])
    }
    cells: list[Sequence[Any]] = []
    while wanted:
        pair = next(iter(wanted))
        fixed = dict(pair)
        options = [[fixed[i]] if i in fixed else column for i, column in enumerate(values)]
        tried = (tuple(column[int(random.random() * len(column))] for column in options) for _ in range(TRIES))
        found = [*islice(filter(possible, tried), ATTEMPTS)]
        if not found:
            del wanted[pair]
            continue
        pairs = [[*combinations(enumerate(cell), 2)] for cell in found]
        best = max(range(len(found)), key=lambda i: sum(one in wanted for one in pairs[i]))
        for one in pairs[best]:
            wanted.pop(one, None)
        cells.append(found[best])
    return cells


def drawn_cells() -> list[Cell]:
    """Those of every run: any two values meet. Of policies and formats that differ little there is one of each kind."""
    columns = {**COLUMNS, "policy": FIRST_POLICIES, "weights": FIRST_WEIGHTS}
    return [Cell(*cell) for cell in covering(columns, SEED)]


def cells_of(family: str, weights: str, variant: str) -> list[Cell]:
    """All cells of one model."""
    columns = {**COLUMNS, "family": [family], "weights": [weights], "variant": [variant]}
    return [Cell(*cell) for cell in product(*columns.values()) if possible(cell)]


@cache
def prompt_of(family: str, weights: str) -> list[int]:
    """Something to copy, with a token of the model's own, so that texts of several models differ."""
    index = [*FAMILIES].index(family) + WEIGHTS.index(weights)
    return [3, 1, 4, 1, 5, 3, 1, 4, index % VOCAB_SIZE]


@cache
def plain_text(
    family: str, weights: str, variant: str, kv_dtype: str, settings: str, rows: int | None = None
) -> list[int]:
    """The greedy text of plain decoding."""
    cell = Cell(family, weights, variant, kv_dtype, "ar", 1, "greedy", "alone", settings, rows)
    with kernels_of(variant):
        return run_alone(cell.model, wish_of(cell)).tokens


@cache
def said_by(family: str, weights: str) -> list[int]:
    """What the model says without any stop."""
    variant = next(one for one in VARIANTS if exists(family, weights, one))
    return plain_text(family, weights, variant, "auto", "length")


def options_of(family: str, weights: str, settings: str) -> dict[str, Any]:
    """Fields of a GenerationConfig. A stop is taken from what the model says without one, so that it is met."""
    if settings not in ("eos", "stop string"):
        return SETTINGS[settings]
    said = said_by(family, weights)
    if settings == "eos":  # the token that comes for the first time as late as any
        return {"eos_token_id": [max({*said}, key=said.index)]}
    at = next((at for at in range(7, len(said) - 1) if said[at] != said[at - 1]), 7)
    return {"stop_strings": [tiny_tokenizer().decode(said[at : at + 2])]}


@cache
def transformers_text(family: str, weights: str, settings: str) -> list[int]:
    """transformers' own greedy text, of the numbers that the weights stand for, in float64."""
    model: Any = source_of(family, weights).reference
    options = options_of(family, weights, settings)
    return reference_greedy(model, prompt_of(family, weights), max_new_tokens=NEW_TOKENS, **options)


def wish_of(cell: Cell) -> Wish:
    """The cell's text."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS}
    config = dict(options_of(cell.family, cell.weights, cell.settings))
    if cell.mode != "greedy":
        options |= {"do_sample": True, "seed": 11}
        options |= {"top_k": 1} if cell.mode == "one choice" else {"temperature": 1.2, "top_k": 9}
    if config:
        options["generation_config"] = GenerationConfig(**config)
    return Wish(
        prompt=prompt_of(cell.family, cell.weights), policy=cell.policy, exit_layer=cell.exit_layer, options=options
    )


def check_cell(cell: Cell) -> Course:
    """The one check. Returns what came of the text.

    Greedy text, and text in which there is one choice, is that of plain decoding, which in float64 is transformers' own token
    for token, and in other formats is compared with transformers by `check_plain`. On operators in float32 the two may part
    at a near-tie. In company the text, its rounds and its rows of the cache are those that it has alone, sampled or not.
    """
    with kernels_of(cell.variant):
        model = cell.model
        wish = wish_of(cell)
        course = alone = run_alone(model, wish)
        if cell.company != "alone":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(selfspec.engine.engine, "PIECE_ROWS", 5)  # prompts in pieces while others decode
                generator = SelfSpecGenerator(model, tiny_tokenizer(), prefix_cache=0)
                course = run_together(generator, [COMPANY[0], replace(wish, joins=2), *COMPANY[1:]])[1]
            rounds, exact = not (cell.varies or cell.policy in WAVES), cell.bitwise and not cell.varies
            assert_same(course, alone, rounds=rounds, exact=exact)
        assert course.error is None and course.result is not None
        assert course.result.new_tokens == course.tokens
        if cell.settings == "stop string":
            assert_cut(course, options_of(cell.family, cell.weights, cell.settings)["stop_strings"])
        if cell.mode == "seeded":
            if cell.company == "alone":
                assert_same(course, run_alone(model, wish), exact=cell.bitwise)
        elif cell.weights == "float64":
            assert course.tokens == transformers_text(cell.family, cell.weights, cell.settings)
        else:
            plain = plain_text(cell.family, cell.weights, cell.variant, cell.kv_dtype, cell.settings, cell.rows)
            assert course.tokens == plain or (not cell.bitwise and part_at_a_near_tie(cell, course.tokens, plain))
    return course


def assert_cut(course: Course, stops: list[str]) -> None:
    """A server's text, which comes piece by piece, ends before the stop string."""
    text, whole = TrimmedText(tiny_tokenizer(), Stops(stops)), tiny_tokenizer().decode(course.tokens)
    found = "".join(text.push([token]) for token in course.tokens) + text.finish()
    assert found == min((whole.split(stop)[0] for stop in stops), key=len)
    assert course.result is not None
    assert found == whole or course.result.stop_reason == "stop_string"  # which may have begun in the prompt


def gaps(family: str, weights: str, new: list[int]) -> list[float]:
    """How far each token's logit is behind the best one, by transformers' forward in float64."""
    prompt, reference = prompt_of(family, weights), source_of(family, weights).reference
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *new]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.amax(-1) - logits.gather(-1, torch.tensor(new).unsqueeze(-1))[:, 0]).tolist()


def part_at_a_near_tie(cell: Cell, left: list[int], right: list[int]) -> bool:
    """Whether the first token in which two texts differ is as good in one as in the other."""
    at = next((i for i, (one, other) in enumerate(zip(left, right)) if one != other), None)
    return at is not None and all(gaps(cell.family, cell.weights, text)[at] < NEAR_TIE for text in (left, right))


def check_plain(family: str, weights: str, variant: str) -> None:
    """Plain decoding takes transformers' best token at every position, or one that is as good. Rows are not in 8 bits."""
    tokens = plain_text(family, weights, variant, "auto", "length", 16 if weights in ROUNDED_ROWS else None)
    assert len(tokens) == NEW_TOKENS
    assert max(gaps(family, weights, tokens)) < NEAR_TIE
