"""A text in company is the text alone: the same tokens by the same rounds, on our own kernels bit for bit."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from random import Random

import pytest
import torch
from companies import (
    BY_COMPANY,
    POLICIES,
    assert_same,
    model_of,
    random_wish,
    run_alone,
    run_together,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiny_llama import tiny_tokenizer

import selfspec.engine
from layerskip_models import LayerSkipModel
from layerskip_models.kernels.check import native_works
from layerskip_models.linear import Layout
from selfspec import SelfSpecGenerator

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not native_works(CPU, torch.float32), reason="no native kernels here")
LAYOUTS = ["plain", pytest.param("native", marks=needs_native)]
EXAMPLES = 60


@cache
def shared_model(layout: Layout) -> LayerSkipModel:
    return model_of(layout)


def generator_of(layout: Layout) -> SelfSpecGenerator:
    return SelfSpecGenerator(shared_model(layout), tiny_tokenizer())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_in_company_is_the_text_alone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any policies, exit layers, settings and stops beside each other; texts join and leave when they like.

    Prompts are read a few rows at a time while others decode. On operators, numbers may differ in their last digits, which no
    text here shows.
    """
    monkeypatch.setattr(selfspec.engine, "PIECE_ROWS", 7)
    count: Counter[str] = Counter()
    names = itertools.cycle(POLICIES)

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
    def check(seed: int) -> None:
        random = Random(seed)
        texts = [random_wish(random, next(names)) for _ in range(random.randint(2, 7))]
        courses = run_together(generator_of(layout), texts)
        for text, course in zip(texts, courses):
            expected = run_alone(shared_model(layout), text)
            if course.result is None:
                assert text.leaves is not None
                assert course.tokens == expected.tokens[: len(course.tokens)]
                count["cancelled"] += 1
                continue
            rounds = text.policy not in BY_COMPANY
            assert_same(course, expected, rounds=rounds, exact=layout == "native" and rounds)
            assert course.result.trace is not None
            count.update(["texts", text.policy, course.result.stop_reason])
            count["sampled"] += bool(text.options.get("do_sample"))
            count["in company"] += any(record.company > 1 for record in course.result.trace)
            count["with drafts accepted and rejected"] += (
                0 < course.result.stats.num_accepted < course.result.stats.num_drafted
            )

    check()
    print(dict(count))
    # Were these rare, the equality above would say little.
    assert min(count[name] for name in POLICIES) >= 3
    assert count["cancelled"] >= EXAMPLES // 4
    assert count["in company"] >= count["texts"] // 2
    assert count["with drafts accepted and rejected"] >= count["texts"] // 3
    assert min(count["sampled"], count["eos"], count["stop_string"]) >= EXAMPLES // 3
