"""SPIDE's Algorithm 1 over recorded drafts: by hand, beside the engine's serial rounds, and beside a transcription of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bench.papers import spide_overlap
from bench.papers.spide_overlap import DraftedText, best_length, drafts_ahead, play, play_arms, record_drafts
from layerskip_models import from_transformers
from policies import parse_policy
from policies.records import Drafter
from policies.spide import AcceptanceTable
from selfspec import SelfSpecGenerator
from tiny_llama import tiny_llama

PROMPTS = ([1, 2, 3, 4, 5], [9, 8, 7, 6, 1, 2])
EXIT = Drafter(2)


def by_hand(right: Sequence[int], confidence: float = 0.95) -> DraftedText:
    """A text of which exit 2 of 8 layers drafts the tokens wrong that `right` has as 0."""
    runs = [[*right[start:], 0].index(0) for start in range(len(right))]
    rows = [[confidence] * (len(right) - start) for start in range(len(right))]
    return DraftedText(exit_layer=2, num_layers=8, accepted=runs, confidences=rows)


def test_figure_2_by_hand() -> None:
    """7 drafts in turn and 4 ahead: 8 are accepted, then 2 of the next 4; the target's token ends the text."""
    text = by_hand([1] * 10 + [0])
    played = play(text, most=7, ahead=4)
    assert (played.tokens, played.calls, played.drafts, played.accepted) == (11, 2, 7 + 4 + 0, 8 + 2)
    # Two devices: 7 drafts of 2 layers, then a call of 8 with 4 drafts beside it; a call alone, as the text has no more.
    assert played.two_devices == 7 * 2 + 8 + 8
    # One: 11 drafts and 8 layers, of which the last judged draft has run 2 already; then 8.
    assert played.one_device == 11 * 2 + 8 - 2 + 8
    # In turn: 7 accepted and a token; then at most 2 drafts, since the target's token is the last: all right, and it.
    serial = play(text, most=7)
    assert (serial.calls, serial.drafts, serial.accepted) == (2, 7 + 2, 9)
    assert serial.two_devices == serial.one_device == 9 * 2 + 2 * 8
    assert play(text, most=0) == play(text, most=0, ahead=4)  # plain decoding has nothing to overlap
    assert play(text, most=0).calls == play(text, most=0).tokens == 11


def test_tau_switches_between_both_modes_and_both_teach_the_table() -> None:
    """Confidence .95 is in the bin of .955, with two observations as a prior: .955, .955^2 = .912, .955^3 = .871 <= .9."""
    table = AcceptanceTable([EXIT])
    text = by_hand([1, 1, 1, 1, 1, 0, 1, 1])
    played = play(text, most=9, ahead=2, tau=0.9, table=table)
    # Three in turn and two ahead, 4 judged and accepted. The one that is left and two ahead: 2 judged, the second is wrong,
    # and the target's token takes its place. In turn again, (5 + 1.91) / (6 + 2) = .864 <= .9 ends after one draft, and one
    # more is made ahead: both are right, which is all.
    assert (played.calls, played.drafts, played.accepted) == (3, 5 + 2 + 2, 4 + 1 + 2)
    assert played.two_devices == (3 * 2 + 8) + 8 + (2 + 8)
    assert sum(table.seen[EXIT]) == 4 + 2 + 2 and sum(table.accepted[EXIT]) == 7
    assert drafts_ahead(text) == 4  # 8 layers in the time of 4 drafts of 2


def test_the_arms_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose drafts are all right: 25 tokens in calls of 13 at length 12, which is the longest that is tried."""
    text = by_hand([1] * 25)
    assert best_length([text]) == 12
    monkeypatch.setattr(spide_overlap, "MOST", 4)
    arms = play_arms([text, by_hand([0] * 25)], 12)
    assert [*arms] == ["fixed", "spide", "serial", "own half's table", "other half's table"]
    assert arms["fixed"][0].calls == 2 and arms["fixed"][0].two_devices == (12 + 11) * 2 + 2 * 8
    # .955^4 = .83 > .7: 4 in turn, of 4 + 4 five are judged, and 20 more in five calls.
    assert arms["spide"][0].two_devices == 4 * 2 + 6 * 8
    assert arms["serial"][0].calls == 5  # five tokens each
    # The second text's drafts are all wrong. Half 1's table has 1.91 of 26 by then: a draft a call, and 25 calls, the last
    # of which has no room for it. Half 0's has 21.91 of 22: four drafts until 0 of 8 more pull it to .73, .73^2 < .7.
    assert arms["own half's table"][1].drafts == 24
    assert arms["other half's table"][1].drafts > 24 and arms["other half's table"][0].calls > 5
    assert arms["own half's table"][0] == arms["serial"][0]


@pytest.fixture(scope="module")
def generator() -> SelfSpecGenerator:
    model = from_transformers(tiny_llama(num_layers=4, late_scale=0.5, dtype=torch.float64, seed=2), layout="plain")
    return SelfSpecGenerator(model, prefix_cache=0)


@pytest.fixture(scope="module")
def texts(generator: SelfSpecGenerator) -> list[dict[int, DraftedText]]:
    return [record_drafts(generator, ids, 40, [1, 2, 3]) for ids in PROMPTS]


@pytest.mark.parametrize(("exit_layer", "tau"), [(1, 0.2), (2, 0.1), (3, 0.5)])
def test_serial_rounds_are_the_engines(
    generator: SelfSpecGenerator, texts: list[dict[int, DraftedText]], exit_layer: int, tau: float
) -> None:
    """Over two texts, with what was learned between them."""
    policy, table = parse_policy(f"spide:{exit_layer},tau={tau}", num_layers=4), AcceptanceTable([Drafter(exit_layer)])
    for ids, text in zip(PROMPTS, texts):
        stats = generator.generate(ids, max_new_tokens=40, policy=policy, do_sample=False, eos_token_id=[]).stats
        played = play(text[exit_layer], most=18, tau=tau, table=table)
        assert (played.tokens, played.calls, played.drafts) == (39, stats.rounds, stats.num_drafted)
        assert (played.accepted, played.one_device) == (stats.num_accepted, stats.loaded_layers)
    assert table.state() == policy.stopping.table.state()
