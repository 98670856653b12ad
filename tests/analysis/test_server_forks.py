"""Forks, stops and log probabilities of a server's answers, by hand."""

from __future__ import annotations

import math

import pytest

from selfspec.analysis.server_check.client import ScoredToken, ServerReply, scored_tokens
from selfspec.analysis.server_check.company import overlapped
from selfspec.analysis.server_check.forks import find_fork, logprob_differences
from selfspec.analysis.server_check.judging import choose_stop


def token(text: str, logprob: float = -0.5, **top: float) -> ScoredToken:
    """top: other tokens, "_" for a space and "end" for one that ends the text."""
    named = {"end": "<|im_end|>", **{name: name.replace("_", " ") for name in top if name != "end"}}
    return ScoredToken(text.encode(), logprob, tuple((named[name].encode(), value) for name, value in top.items()))


def test_equal_texts_have_no_fork() -> None:
    assert find_fork("the same", "the same", 0.25) is None


def test_the_longest_token_that_fits_is_taken() -> None:
    """Both " d" and " dog" go on as the other text does; it is likelier that the model wrote the longer one."""
    tokens = [token("the"), token(" cat", _d=-4.0, _dog=-0.6), token(" sat")]
    fork = find_fork("the cat sat", "the dog ran", 0.25, tokens)
    assert fork is not None
    assert (fork.character, fork.token, fork.expected, fork.got) == (4, 1, " cat", " dog")
    assert (fork.expected_logprob, fork.got_logprob, fork.near_tie) == (-0.5, -0.6, True)


def test_a_fork_inside_a_token_is_that_token() -> None:
    tokens = [token("a"), token(" fork", _fox=-2.0)]
    fork = find_fork("a fork", "a fox", 0.25, tokens)
    assert fork is not None
    assert (fork.character, fork.token, fork.got, fork.near_tie) == (4, 1, " fox", False)


def test_the_token_before_may_have_been_another_one() -> None:
    """ "in" and "to" beside "into": the texts part after "in", whose place is where another token was taken."""
    tokens = [token("in", into=-0.55, it=-3.0), token(" a")]
    fork = find_fork("in a", "into", 0.25, tokens)
    assert fork is not None
    assert (fork.character, fork.token, fork.expected, fork.got, fork.near_tie) == (2, 0, "in", "into", True)


def test_a_token_that_is_not_among_the_likeliest_is_unknown() -> None:
    fork = find_fork("a cat", "a xylophone", 0.25, [token("a"), token(" cat", _dog=-1.0)])
    assert fork is not None
    assert (fork.token, fork.got, fork.got_logprob, fork.near_tie) == (1, "xylophone", None, None)


def test_an_end_is_a_token_too() -> None:
    tokens = [token("a"), token(" cat", end=-0.6, _dog=-0.7)]
    early = find_fork("a cat", "a", 0.25, tokens)
    assert early is not None
    assert (early.token, early.got, early.near_tie) == (1, "<|im_end|>", True)
    tokens = [token("a"), token("<|im_end|>", _cat=-0.6)]
    late = find_fork("a", "a cat", 0.25, tokens)
    assert late is not None
    assert (late.character, late.token, late.expected, late.got, late.near_tie) == (1, 1, "<|im_end|>", " cat", True)


def test_tokens_of_another_text_are_not_used() -> None:
    fork = find_fork("a cat", "a dog", 0.25, [token("the"), token(" cat", _dog=-0.5)])
    assert fork is not None
    assert (fork.character, fork.token, fork.expected, fork.got, fork.near_tie) == (2, None, "cat", "dog", None)


def test_characters_of_several_tokens_are_found_by_their_bytes() -> None:
    """The euro sign is three bytes; here two tokens share it."""
    tokens = [ScoredToken(b"1 \xe2", -0.1, ()), ScoredToken(b"\x82\xac", -0.5, ((b"\x82\xa4", -0.5),)), token(" x")]
    fork = find_fork("1 € x", "1 ₤ x", 0.25, tokens)
    assert fork is not None
    assert (fork.character, fork.token) == (2, 0)  # where the character begins


def test_a_space_that_the_server_strips_is_no_other_text() -> None:
    fork = find_fork("The cat", "The dog", 0.25, [token(" The"), token(" cat", _dog=-0.6)])
    assert fork is not None
    assert (fork.token, fork.near_tie) == (1, True)


def test_log_probabilities_are_compared_up_to_the_fork() -> None:
    left = [token("a", -0.5), token("b", -1.0), token("c", -9.0)]
    right = [token("a", -0.4), token("b", -1.3), token("d", -1.0)]
    assert logprob_differences(left, right) == [pytest.approx(0.1), pytest.approx(0.3)]


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("short", None),
        ("abcdefghijkl mnop", "kl m"),  # across a space, from 40 % on
        ("abcdefghijklmnop", "ghij"),  # no space: the first that is new at index 6
        ("aaaaaaaaaaaaaaaa", None),  # found earlier than where it was taken
        ("             \n      ", None),
    ],
)
def test_a_stop_is_new_where_it_is_taken(text: str, stop: str | None) -> None:
    assert choose_stop(text) == stop


def test_both_forms_of_log_probabilities_are_read() -> None:
    chat = {
        "content": [
            {
                "token": "é",
                "bytes": [195, 169],
                "logprob": -0.5,
                "top_logprobs": [{"token": "e", "bytes": None, "logprob": -1.0}],
            }
        ]
    }
    legacy = {"tokens": ["é"], "token_logprobs": [-0.5], "top_logprobs": [{"e": -1.0}]}
    assert scored_tokens(chat) == scored_tokens(legacy) == (ScoredToken("é".encode(), -0.5, ((b"e", -1.0),)),)
    assert scored_tokens({"tokens": ["a", "b"], "token_logprobs": [None, -1.0], "top_logprobs": None}) == (
        ScoredToken(b"b", -1.0, ()),
    )
    for nothing in (None, {}, {"content": []}, {"tokens": []}):
        assert scored_tokens(nothing) is None


@pytest.mark.parametrize(
    ("spans", "together"),
    [
        ([(0.0, 1.0), (0.2, 1.2)], True),
        ([(0.0, 1.0), (1.0, 2.0)], False),
        ([(0.0, 1.0), (0.9, 2.0)], False),  # a moment proves nothing
        ([(0.0, 1.0), (1.0, 2.0), (0.1, 0.3)], True),
        ([(0.0, 1.0), (0.5, 0.5)], None),  # the second came in one piece
    ],
)
def test_streams_that_run_together(spans: list[tuple[float, float]], together: bool | None) -> None:
    replies = [ServerReply(text="x", first_seconds=first, last_seconds=last) for first, last in spans]
    assert overlapped(replies) is together


def test_a_token_of_no_probability_is_no_near_tie() -> None:
    fork = find_fork("a cat", "a dog", 0.25, [token("a"), token(" cat", _dog=-math.inf)])
    assert fork is not None
    assert fork.near_tie is False
