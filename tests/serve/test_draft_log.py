"""The field of streamed chunks that says what became of each draft, in step with the text that is sent."""

from __future__ import annotations

from random import Random

import pytest

from layerskip_models import DEMO_PATH
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.engine.call import run_calls
from selfspec.serve.api_responses import Piece
from selfspec.serve.draft_log import DraftLog

PROMPT = "Question: Tom has 3 apples and buys 4 more. How many \N{DEER}\N{DEER}"


@pytest.fixture(scope="module")
def demo() -> SelfSpecGenerator:
    return SelfSpecGenerator.from_pretrained(DEMO_PATH)


def logged(demo: SelfSpecGenerator, **options: object) -> tuple[DraftLog, GenerationResult]:
    assert demo.tokenizer is not None
    log, result = DraftLog(demo.tokenizer), None
    for seconds, progress in enumerate(run_calls([demo.check(PROMPT, trace=True, **options)])):
        log.add(Piece(index=0, steps=[progress], seconds=float(seconds)))
        result = progress.result
    assert result is not None
    return log, result


def text_of(field: dict) -> str:
    return "".join(piece["text"] for piece in field["pieces"] if piece["fate"] != "rejected")


@pytest.mark.parametrize("policy", ["ls:3-4", "ar"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_the_text_wherever_it_is_cut(demo, policy, seed):
    """A server sends text later than it comes, and in other portions, when a stop string may have begun."""
    log, result = logged(demo, policy=policy, max_new_tokens=40, do_sample=True, seed=seed, eos_token_id=[])
    random = Random(seed)
    assert result.text is not None
    text, fields = result.text, []
    while text:
        length = random.randint(0, 12)
        fields.append(log.take(min(length, len(text))))
        assert text_of(fields[-1]) == text[:length]
        text = text[length:]
    assert sum(field["tokens"] for field in fields) == result.stats.num_new_tokens
    rounds = [round_ for field in fields for round_ in field["rounds"]]
    assert len(rounds) == result.stats.rounds == fields[-1]["seconds"]
    assert sum(round_["drafted"] for round_ in rounds) == result.stats.num_drafted
    assert sum(round_["accepted"] for round_ in rounds) == result.stats.num_accepted
    fates = {piece["fate"] for field in fields for piece in field["pieces"]}
    assert fates == ({"target"} if policy == "ar" else {"target", "accepted", "rejected", "corrected", "bonus"})


def test_copied_pieces_say_so_and_stay_accepted_for_those_who_do_not_look(demo):
    store = [(demo.generate(PROMPT, max_new_tokens=40, policy="ar").text or "") * 2]
    log, result = logged(demo, policy="copy:6", max_new_tokens=40, do_sample=False, copy_from=store)
    assert result.text is not None
    field = log.take(len(result.text))
    assert text_of(field) == result.text
    copied = [piece for piece in field["pieces"] if "copied" in piece]
    assert copied and all(piece["copied"] is True and piece["fate"] == "accepted" for piece in copied)
    assert {piece["fate"] for piece in field["pieces"]} <= {"target", "accepted", "rejected", "corrected", "bonus"}
    rounds = field["rounds"]
    assert sum(one["copied"] for one in rounds) == result.stats.num_copied > 0
    right = sum(min(one["copied"], one["accepted"]) for one in rounds)
    assert right == result.stats.num_copied_accepted >= len(copied)
    assert sum(one["drafted"] for one in rounds) == result.stats.num_drafted


def test_numbers_come_once_and_text_behind_a_stop_not_at_all(demo):
    log, result = logged(demo, policy="ls:3-4", max_new_tokens=20, do_sample=False)
    assert result.text is not None
    first, second = log.take(3), log.take(2)
    assert text_of(first) + text_of(second) == result.text[:5]
    assert first["tokens"] == 20 and second["tokens"] == 0
    assert first["rounds"] and not second["rounds"]


def test_rejected_drafts_stand_before_the_token_in_their_place(demo):
    log, result = logged(demo, policy="ls:3-4", max_new_tokens=30, do_sample=False)
    assert result.trace is not None and result.text is not None
    fates = [piece["fate"] for piece in log.take(len(result.text))["pieces"]]
    places = [place for place, fate in enumerate(fates) if fate == "rejected"]
    assert len(places) == sum(record.num_accepted < record.num_drafted for record in result.trace) > 0
    assert all(fates[place + 1] == "corrected" for place in places)
