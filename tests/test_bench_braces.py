"""Names of policies with braces as grids."""

from __future__ import annotations

import pytest

from bench.commands.braces import expand, expand_all


def names(template: str) -> list[str]:
    return [policy.name for policy in expand(template)]


def test_one_brace_and_several() -> None:
    assert names("spide:3,tau={0.5,0.6}") == ["spide:3,tau=0.5", "spide:3,tau=0.6"]
    assert names("ls:{1-3}-{2,4}") == ["ls:1-2", "ls:1-4", "ls:2-2", "ls:2-4", "ls:3-2", "ls:3-4"]
    assert names("auto") == ["auto"]
    assert names("{auto,del}:cost=layers") == ["auto:cost=layers", "del:cost=layers"]
    assert expand_all(["ar", "fs:1-{1,2}"]) == ["ar", "fs:1-1", "fs:1-2"]


@pytest.mark.parametrize(
    ("template", "axes"),
    [
        ("ls:{1,2}-{3,4}", ["exit layer", "drafts a round"]),
        ("ls:3-{3,4}", ["drafts a round"]),
        ("spide:{1,2},tau={0.5,0.6}", ["exit layer", "tau"]),
        ("del:layers=1/{2,3}+spide:tau={0.5,0.6}", ["layers", "tau"]),
        ("del:omega={0.5,0.9}+del:omega={0.5,0.9}", ["omega", "omega 2"]),
        ("{auto,del}", ["policy"]),
        ("ls:3-18+{del,spide}", ["policy"]),
    ],
)
def test_axes_have_names(template: str, axes: list[str]) -> None:
    for policy in expand(template):
        assert list(policy.values) == axes
    assert len({tuple(policy.values.values()) for policy in expand(template)}) == len(expand(template))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("spide:3,tau={0.5", "a brace is not closed"),
        ("spide:3,tau=0.5}", "closes that was not opened"),
        ("spide:3,tau={0.5,{0.6}}", "cannot be nested"),
        ("spide:3,tau={}", "lacks a value"),
        ("spide:3,tau={0.5,}", "lacks a value"),
        ("ls:{3-1}-2", "3-1 in braces must rise"),
        ("ls:{1-3,2}-2", "2 comes twice"),
    ],
)
def test_bad_braces_are_told(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(template)
