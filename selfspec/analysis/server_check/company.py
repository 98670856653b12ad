"""Requests that are sent at once, and whether the server worked on them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from threading import Barrier

from selfspec.analysis.server_check.client import Question, ServerReply


def ask_in_groups(
    ask: Callable[[Question], ServerReply],
    questions: Sequence[Question],
    company: int,
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[ServerReply], bool | None]:
    """Ask in groups of `company` requests that start together; the last group is filled up with questions of the first.

    Returns the replies to the questions, in order, and whether answers overlapped in time in most groups; None where that
    cannot be seen, as for answers that are not streamed. advance: called after every request.
    """
    replies: list[ServerReply] = []
    seen: list[bool] = []
    with ThreadPoolExecutor(company) as threads:
        for start in range(0, len(questions), company):
            group = [questions[index % len(questions)] for index in range(start, start + company)]
            together = Barrier(company)

            def sent(question: Question, together: Barrier = together) -> ServerReply:
                together.wait()
                reply = ask(question)
                advance()
                return reply

            answered = list(threads.map(sent, group))
            replies += answered
            overlap = overlapped(answered)
            seen += [] if overlap is None else [overlap]
    return replies[: len(questions)], 2 * sum(seen) > len(seen) if seen else None


def overlapped(replies: Sequence[ServerReply]) -> bool | None:
    """Whether two streams ran together for half of the shorter one's time; None unless two came in several pieces.

    The times are those at which this machine read the pieces, so a moment that two streams share proves nothing.
    """
    spans = [
        (reply.first_seconds, reply.last_seconds)
        for reply in replies
        if reply.first_seconds is not None
        and reply.last_seconds is not None
        and reply.first_seconds < reply.last_seconds
    ]
    if len(spans) < 2:
        return None
    return any(
        min(a[1], b[1]) - max(a[0], b[0]) >= 0.5 * min(a[1] - a[0], b[1] - b[0]) for a, b in combinations(spans, 2)
    )
