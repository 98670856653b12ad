"""What goes wrong in two stages: one clear error, and the next text is decoded; no error where plain decoding has none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from staged_models import save_staged, staged_llama
from test_judge import From
from tiny_llama import reference_greedy
from torch import Tensor
from transformers import LogitsProcessorList

from layerskip_models import LayerSkipModel
from selfspec import NonFiniteLogitsError
from selfspec.parallel.drafting_stage import DraftingStage
from selfspec.parallel.stage_messages import DraftedRow, DrafterError, Failed, as_array, as_tensor, processors_on
from selfspec.parallel.two_stages import TwoStages
from selfspec.parallel.verifying_stage import VerifyingStage

PROMPT, NEW = [9, 9, 3, 0, 23], 20
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_staged(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def stages(folder: Path) -> Iterator[TwoStages]:
    with opened(folder) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return reference_greedy(staged_llama(), PROMPT, max_new_tokens=NEW)


def opened(folder: Path) -> TwoStages:
    return TwoStages(folder, 2, dtype="float64", devices=("cpu", "cpu"), lead=(4, 8), start="fork")


@pytest.mark.parametrize("at", [len(PROMPT), len(PROMPT) + 6], ids=["the first token", "a later one"])
@pytest.mark.parametrize(("how", "options"), [("nan", {}), ("nan", SAMPLED), ("masked", SAMPLED)])
def test_no_distribution(at: int, how: str, options: dict[str, Any], stages: TwoStages, expected: list[int]) -> None:
    processors = LogitsProcessorList([From(at, how)])
    with pytest.raises(NonFiniteLogitsError, match=f"distribution at position {at}: "):
        stages.generate(PROMPT, max_new_tokens=NEW, logits_processor=processors, **options)
    assert stages.generate(PROMPT, max_new_tokens=NEW).new_tokens == expected
    # A text that ends before it is none the worse.
    before = at - len(PROMPT)
    if before:
        result = stages.generate(PROMPT, max_new_tokens=before, logits_processor=processors, **options)
        assert len(result.new_tokens) == before


def test_a_processor_that_raises(stages: TwoStages, expected: list[int]) -> None:
    for options in ({}, SAMPLED):
        processors = LogitsProcessorList([From(len(PROMPT) + 4, "raises")])
        with pytest.raises(KeyError, match="no such state"):
            stages.generate(PROMPT, max_new_tokens=NEW, logits_processor=processors, **options)
        assert len(stages.generate(PROMPT, max_new_tokens=4, logits_processor=processors, **options).new_tokens) == 4
    assert stages.generate(PROMPT, max_new_tokens=NEW).new_tokens == expected


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_an_exit_that_says_nothing(
    options: dict[str, Any], folder: Path, stages: TwoStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it shows: other drafts, and when sampling another text of the same law."""
    logits = LayerSkipModel.draft_logits

    def spoilt(model: LayerSkipModel, hidden: Tensor) -> Tensor:
        return torch.full_like(logits(model, hidden), torch.nan)

    monkeypatch.setattr(LayerSkipModel, "draft_logits", spoilt)  # in the process that is forked now
    with opened(folder) as blind:
        result = blind.generate(PROMPT, max_new_tokens=NEW, **options)
    assert result.stats.accepted < NEW // 2
    if not options:
        assert result.new_tokens == stages.generate(PROMPT, max_new_tokens=NEW).new_tokens
    assert len(result.new_tokens) == NEW


def test_a_row_that_overflows_behind_a_rejected_draft(
    folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It spoils the rows that are verified with it, which plain decoding never does: they are judged again without it."""
    step, judge, judged = DraftingStage._step, VerifyingStage._judge, []

    def spoiling(self: DraftingStage, tokens: Tensor, length: int, *others: Any) -> DraftedRow:
        row, at = step(self, tokens, length, *others), length - len(PROMPT)
        if at % 6 == 2:  # a wrong draft
            row.token = (expected[at] + 1) % 24
        if at % 6 == 3 and int(tokens[0, length - 1]) != expected[at - 1]:  # behind it
            row.hidden = np.full_like(row.hidden, np.nan)
        return row

    def counting(self: VerifyingStage, *arguments: Any) -> Any:
        judged.append(judge(self, *arguments))
        return judged[-1]

    monkeypatch.setattr(DraftingStage, "_step", spoiling)
    monkeypatch.setattr(VerifyingStage, "_judge", counting)
    with opened(folder) as stages:
        assert stages.generate(PROMPT, max_new_tokens=NEW).new_tokens == expected
    assert any(one.failure is not None for one in judged)


def test_a_drafter_that_fails(folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the second step of every text whose prompt begins with 7."""
    step = DraftingStage._step

    def failing(self: DraftingStage, tokens: Tensor, length: int, *others: Any) -> DraftedRow:
        if length == 2 and int(tokens[0, 0]) == 7:
            raise torch.OutOfMemoryError("no memory for a row")
        return step(self, tokens, length, *others)

    monkeypatch.setattr(DraftingStage, "_step", failing)
    with opened(folder) as stages:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="no memory for a row"):
                stages.generate([7], max_new_tokens=NEW)
            assert stages.generate(PROMPT, max_new_tokens=NEW).new_tokens == expected


def test_a_drafter_that_ends(folder: Path) -> None:
    with opened(folder) as stages:
        assert stages._link is not None
        assert stages._link.process.pid is not None
        os.kill(stages._link.process.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(DrafterError, match="the process that drafts has ended: open the stages again"):
                stages.generate(PROMPT, max_new_tokens=4)
    with opened(folder) as stages:
        assert len(stages.generate(PROMPT, max_new_tokens=4).new_tokens) == 4
    with pytest.raises(RuntimeError, match="the stages are not open"):
        stages.generate(PROMPT, max_new_tokens=4)


def test_a_streamer_that_breaks_off(stages: TwoStages, expected: list[int]) -> None:
    class Breaking:
        def __init__(self) -> None:
            self.puts = 0

        def put(self, value: Tensor) -> None:
            self.puts += 1
            if self.puts == 4:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        stages.generate(PROMPT, max_new_tokens=NEW, streamer=Breaking())
    assert stages.generate(PROMPT, max_new_tokens=NEW).new_tokens == expected


def test_wrong_calls(stages: TwoStages, expected: list[int]) -> None:
    for options, error, said in (
        ({"policy": "del"}, TypeError, "no argument 'policy'; it takes prompt, messages, seed, streamer"),
        ({"max_tokens": 3}, TypeError, "did you mean max_new_tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, TypeError, "give a prompt or messages, not both"),
        ({"max_new_tokens": 100}, ValueError, "exceed this model's context"),
        ({"logits_processor": LogitsProcessorList([lambda ids, scores: scores])}, TypeError, "at the top of a module"),
    ):
        with pytest.raises(error, match=said):
            stages.generate(PROMPT, **options)
    assert stages.generate(PROMPT, max_new_tokens=NEW).new_tokens == expected


def test_numbers_on_their_way() -> None:
    """In every dtype bit for bit, bfloat16 too, which NumPy does not have; in the other stage's dtype where that differs."""
    cpu = torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        values = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        rows = np.stack([as_array(row) for row in values])
        assert torch.equal(as_tensor(rows, dtype, cpu), values)
        assert torch.equal(as_tensor(rows, torch.float32, cpu), values.float())


def test_processors_go_where_a_stage_is() -> None:
    class Favouring(From):
        def __init__(self) -> None:
            super().__init__(99, "nan")
            self.bias = torch.ones(3)

    own = LogitsProcessorList([Favouring(), From(3, "nan")])
    moved = processors_on(own, torch.device("meta"))
    assert (own[0].bias.device.type, moved[0].bias.device.type) == ("cpu", "meta")
    assert moved[1] is own[1]


class Stubborn(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_an_error_that_cannot_be_sent_is_described() -> None:
    assert str(Failed.because(ValueError("as it is")).error) == "as it is"
    described = Failed.because(Stubborn(1, 2)).error
    assert isinstance(described, DrafterError)
    assert str(described) == "the process that drafts failed with Stubborn: 1 and 2"
