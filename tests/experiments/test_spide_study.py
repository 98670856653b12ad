"""SPIDE over recorded drafts: its serial rounds are the engine's, its calls those of a transcription of Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.experiments.__main__ import app
from bench.experiments.spide.algorithm import Call, drafts_ahead, longest_runs, play
from bench.experiments.spide.arms import Arm
from bench.experiments.spide.free_drafts import DraftedText, FreeDraft, draft_along
from bench.experiments.spide.spide_tables import interval
from bench.record import read_record
from bench.report.markdown import markdown
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kv_cache import KVCache
from policies import NeverStop, SpideStopping, parse_policy
from policies.acceptance_table import PAPER_BINS
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

PROMPTS = ([1, 2, 3, 4, 5], [9, 8, 7, 6, 1, 2])


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(num_layers=4, late_scale=0.5, dtype=torch.float64, seed=2), layout="plain")
    return SelfSpecGenerator(model, prefix_cache=0)


@pytest.fixture(scope="module")
def texts(generator: SelfSpecGenerator) -> dict[int, list[DraftedText]]:
    """By exit layer, of each prompt."""
    found = [draft_along(generator, torch.tensor(ids), 40, [1, 2, 3], 24) for ids in PROMPTS]
    return dict(zip((1, 2, 3), map(list, zip(*found))))


@pytest.mark.parametrize(
    "name",
    [
        "spide:1,tau=0.2",
        "spide:2,tau=0.1,bins=paper",
        "dv:1,start=0.3",
        "svip:2,threshold=1.2",
        "adaedl:1",
        "fs:2-3",
        "ls:1-4",
    ],
)
def test_serial_rounds_are_the_engines(
    generator: SelfSpecGenerator, texts: dict[int, list[DraftedText]], name: str
) -> None:
    """Drafted and accepted, round by round, over two texts with what was learned between them."""
    policy = parse_policy(name, num_layers=4)
    stopping = parse_policy(name, num_layers=4).stopping or NeverStop()
    exit_layer = int(name.partition(":")[2][0])
    most = 4 if name.startswith("ls") else getattr(stopping, "max_length", 18)
    rounds: set[tuple[int, int]] = set()
    for ids, text in zip(PROMPTS, texts[exit_layer]):
        result = generator.generate(ids, max_new_tokens=40, policy=policy, do_sample=False, eos_token_id=[], trace=True)
        assert result.trace is not None
        expected = [(record.num_drafted, record.num_accepted, len(record.tokens)) for record in result.trace]
        calls = play(text, stopping, most=most)
        assert [(call.drafted, call.accepted, call.tokens) for call in calls] == expected
        layers = [call.layers(exit_layer, 4) for call in calls]
        assert layers == [record.loaded_layers for record in result.trace]
        rounds |= {(call.drafted, call.accepted) for call in calls}
    assert len(rounds) > 2


Table = dict[int, list[float]]
"""Per interval of confidence: accepted, judged."""


def printed_algorithm(
    M_q: Callable[[list[int]], tuple[int, float]],
    M_p: Callable[[list[int]], int],
    x: list[int],
    L: int,
    s: int,
    tau: float,
    T: Table,
    most: int,
) -> tuple[list[int], list[tuple[str, int, int, int]]]:
    """Algorithm 1 of SPIDE, greedily, line by line. Returns the text, and of each call mode, k, s and n.

    Readings: n goes up to k + 1 (lines 28 and 30 disagree as printed); the first of the last s drafts was judged by the call
    before, so s - 1 are kept (line 33, Figure 2); drafts end with the text. The table starts with two observations at each
    interval's midpoint, where the paper says nothing. most: drafts in a row that are made serially, which it does not limit.
    """
    mode, calls, k = "serial", [], 0
    drafts: list[tuple[int, float]] = []
    while len(x) < L:  # line 1
        called = mode
        if mode == "serial":  # 2
            gamma = 1.0  # 4
            drafts = []
            for _ in range(1, min(most, L - len(x) - 1) + 1):  # 5
                drafts.append(M_q(x + [token for token, _ in drafts]))  # 6, 7
                accepted, judged = T[interval_of(drafts[-1][1])]  # 8, 9
                gamma *= accepted / judged  # 10
                if gamma <= tau:  # 11
                    break  # 12, 13
            k = len(drafts)
        made = 0
        if k or called == "parallel":
            for _ in range(k + 1, min(k + s, L - len(x)) + 1):  # 19
                drafts.append(M_q(x + [token for token, _ in drafts]))  # 21, 22
                made += 1
        whole = k + 1 if made else k
        tokens = [token for token, _ in drafts]
        p = [M_p(x + tokens[:i]) for i in range(k + 1)]  # 25
        n = min([i for i in range(whole) if tokens[i] != p[i]] + [whole])  # 28, greedy
        for i in range(min(n + 1, whole)):  # 29
            T[interval_of(drafts[i][1])][0] += i < n
            T[interval_of(drafts[i][1])][1] += 1
        calls.append((called, k, made, n))
        if made and n == whole:  # 30
            x = x + tokens[:whole]  # 32
            drafts = drafts[whole:]
            k, mode = len(drafts), "parallel"  # 33, 34
        else:
            x = (x + tokens[:n] + [p[n]])[:L] if n < len(p) else x + tokens[:n]  # 37, 38
            mode = "serial"  # 39
    return x, calls


def interval_of(confidence: float) -> int:
    """[0, 0.1), ..., [0.8, 0.9), [0.90, 0.91), ..., [0.99, 1.0), 1.0 of Figure 4."""
    if confidence >= 1.0:
        return 19
    return int(confidence * 10) if confidence < 0.9 else 9 + int((confidence - 0.9) * 100 + 1e-9)


@cache
def first_choices(model: LayerSkipModel, layers: int) -> Callable[[list[int]], tuple[int, float]]:
    """The token and confidence that the first layers give after a text, computed afresh, once."""

    @cache
    @torch.inference_mode()
    def choose(text: tuple[int, ...]) -> tuple[int, float]:
        ids = torch.tensor(text)
        hidden = model.run_layers(model.embed(ids), 0, layers, KVCache(model, len(text)))
        logits = (model.logits if layers == model.num_layers else model.draft_logits)(hidden[-1:])[0]
        return int(logits.argmax()), float(logits.double().softmax(-1).max())

    return lambda text: choose(tuple(text))


@pytest.mark.parametrize(("exit_layer", "s", "tau"), [(1, 4, 0.3), (1, 2, 0.7), (2, 1, 0.5), (3, 6, 0.1)])
def test_calls_are_those_of_the_printed_algorithm(
    generator: SelfSpecGenerator, texts: dict[int, list[DraftedText]], exit_layer: int, s: int, tau: float
) -> None:
    table: Table = {bin: [2 * midpoint, 2.0] for bin, midpoint in enumerate(PAPER_BINS.midpoints)}
    stopping = SpideStopping((exit_layer,), num_layers=4, tau=tau, bins="paper")
    draft, target = first_choices(generator.model, exit_layer), first_choices(generator.model, 4)
    modes: set[str] = set()
    for ids, text in zip(PROMPTS, texts[exit_layer]):
        begin = [*ids, text.tokens[0]]
        whole, calls = printed_algorithm(
            draft, lambda x: target(x)[0], begin, len(ids) + 40, s, tau, table, stopping.max_length
        )
        assert whole == [*ids, *text.tokens]
        played = play(text, stopping, most=stopping.max_length, ahead=s)
        left = [call.judged - (call.ahead > 0) for call in played]
        assert [(call.mode, k, call.ahead, call.accepted) for call, k in zip(played, left)] == calls
        modes |= {call.mode for call in played}
        assert sum(call.tokens for call in played) == 39
    assert modes == {"serial", "parallel"}
    for bin, (accepted, judged) in table.items():
        assert stopping.table.seen[exit_layer][bin] == judged - 2
        assert stopping.table.accepted[exit_layer][bin] == pytest.approx(accepted - 2 * PAPER_BINS.midpoints[bin])


def by_hand(right: Sequence[int], confidence: float = 0.95, window: int = 12) -> DraftedText:
    """A text of tokens 1 whose draft from each position is wrong (token 0) at the positions that `right` has as 0."""
    tokens = (1,) * (len(right) + 1)
    drafts = []
    for start in range(1, len(tokens)):
        own = tuple(right[start - 1 : start - 1 + window])
        drafts.append(FreeDraft(tokens=own, confidences=(confidence,) * len(own), entropies=(0.1,) * len(own)))
    return DraftedText(
        prompt="p", task="t", num_prompt_tokens=3, exit_layer=2, num_layers=8, window=window, tokens=tokens,
        drafts=tuple(drafts),
    )  # fmt: skip


def test_figure_2_by_hand() -> None:
    """k = 7 drafts in turn and s = 4 ahead: [x1..x8] are judged, then [x9..x12], of which x11 is rejected."""
    text = by_hand([1] * 10 + [0] + [1] * 6)
    seven = Arm(name="fixed", length=7).stopping(2, 8)
    calls = play(text, seven, most=7, ahead=4)
    assert calls[:2] == [
        Call(mode="serial", drafted=7, ahead=4, judged=8, accepted=8, tokens=8),
        Call(mode="parallel", drafted=0, ahead=4, judged=4, accepted=2, tokens=3),
    ]
    assert calls[2].mode == "serial" and sum(call.tokens for call in calls) == 17
    # 8 layers, exit 2. One device: 11 drafts of 2 layers, and the 6 layers behind the exit; two: 7 drafts, then 4 of 2 in 8.
    assert calls[0].layers(2, 8) == 22 + 6 and calls[0].two_device_time(2, 8) == 14 + 8
    assert calls[1].layers(2, 8) == 8 + 6 and calls[1].two_device_time(2, 8) == 8
    assert longest_runs(calls[:2]) == [10]
    assert drafts_ahead(2, 8) == 4 and drafts_ahead(3, 16) == 5


def test_a_window_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="need a window of 13"):
        play(by_hand([1, 1]), NeverStop(), most=9, ahead=4)


def test_the_interval_holds_the_ratio_and_is_narrow_where_texts_agree() -> None:
    lines = [{"prompt": str(i), "tokens": 10 + i, "two_devices": 100} for i in range(9)]
    twice = [{**line, "tokens": 2 * line["tokens"]} for line in lines]

    def rate(found: Sequence[dict[str, int]]) -> float:
        return sum(line["tokens"] for line in found) / sum(line["two_devices"] for line in found)

    assert interval(twice, lines, "two_devices") == pytest.approx((2.0, 2.0))
    uneven = [{**line, "tokens": line["tokens"] * (1 + (i % 2))} for i, line in enumerate(lines)]
    low, high = interval(uneven, lines, "two_devices")
    assert 1.0 <= low < rate(uneven) / rate(lines) < high <= 2.0


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "spide.jsonl"
    arguments = ["spide", "code", "--tuning", "1", "--num-samples", "1", "--prompt-tokens", "30", "--exit-layer", "4"]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "12", "-o", str(path)])
    assert result.exit_code == 0, result.output
    lines = read_record(path)
    arms = [line for line in lines if line["kind"] == "arm"]
    assert {line["tokens"] for line in arms} == {11}
    assert {line["calls"] for line in arms if line["arm"] == "plain"} == {11}
    page = markdown(lines)
    assert "| plain decoding | 4 | – |" in page and "s by simulation" in page
    assert not set(lines[0]["configuration"]["tuning_prompts"]) & {line["prompt"] for line in arms}
    few = CliRunner().invoke(app, ["spide", "code", "--tuning", "9"])
    assert few.exit_code == 2 and "more than --tuning 9" in few.output
