from dataclasses import replace

import pytest

from selfspec import SelfSpecGenerator
from selfspec.analysis.comparison import compare, first_difference, summarise
from tiny_llama import tiny_llama


@pytest.fixture(scope="module")
def result():
    generator = SelfSpecGenerator(tiny_llama(seed=3))
    return generator.generate([1, 2, 3], max_new_tokens=8, policy="ls:2-2")


def with_rate(result, tokens_per_second):
    return replace(result, stats=replace(result.stats, tokens_per_second=tokens_per_second))


def test_speedup_and_the_rates_beside_it_are_of_the_middle_pair(result):
    """Medians of all rates, 80 and 30 tokens/s, would be of no pair."""
    fast = [with_rate(result, rate) for rate in (90.0, 20.0, 80.0)]
    slow = [with_rate(result, rate) for rate in (30.0, 5.0, 40.0)]
    found = summarise([*zip(fast, slow)], greedy=True)
    # 90/30, 20/5, 80/40
    assert (found.speedup, found.speedup_min, found.speedup_max) == (3.0, 2.0, 4.0)
    assert found.outputs_equal is True
    assert found.as_dict()["tokens_per_second"] == 90.0
    assert found.as_dict()["baseline_tokens_per_second"] == 30.0
    assert summarise([*zip(fast[:2], slow[:2])], greedy=True).speedup == 3.0  # the lower one of two


def test_a_difference_in_any_run_is_found(result):
    sequences = result.sequences.clone()
    sequences[0, 3 + 5] += 1
    other = replace(result, sequences=sequences)
    assert summarise([(result, result), (other, result)], greedy=True).outputs_equal is False
    assert summarise([(result, result), (other, result)], greedy=True).first_difference == 5
    assert summarise([(result, result), (other, result)], greedy=False).outputs_equal is None


def test_first_difference():
    for left, right, index in (
        ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([1, 2], [1], 1), ([], [], None),
    ):  # fmt: skip
        assert first_difference(left, right) == index


def test_runs_alternate_and_stop_when_interrupted(result):
    calls = []

    def generate(**changes):
        calls.append(changes.get("num_speculations"))
        return result

    numbers = []
    assert compare(generate, repeats=2, greedy=True, before_run=numbers.append).repeats == 2
    assert (calls, numbers) == ([None, 0, None, 0], [0, 1, 2, 3])
    assert compare(generate, repeats=3, greedy=True, interrupted=lambda: len(calls) > 6).repeats == 1
    assert compare(generate, repeats=3, greedy=True, interrupted=lambda: True) is None
