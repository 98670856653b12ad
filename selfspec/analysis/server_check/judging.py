"""From a server's replies to findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfspec.analysis.server_check.client import ScoredToken, ServerReply
from selfspec.analysis.server_check.findings import LogprobFinding, Parting, Section, StopFault, WayFinding
from selfspec.analysis.server_check.forks import find_fork, is_after_sampling, logprob_differences
from selfspec.analysis.server_check.plan import Way

STOP_LENGTH = 4
_ENDS_SHOWN = 20  # characters
_TOO_LITTLE = 8  # characters: a shorter text has no middle to stop in


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The replies to one way to ask, by prompt; None for prompts that were left out."""

    way: Way
    replies: tuple[ServerReply | None, ...]
    overlapped: bool | None = None

    def text(self, prompt: int) -> str | None:
        """The text of a prompt; None without one."""
        reply = self.replies[prompt]
        return None if reply is None or reply.error is not None else reply.text

    @property
    def unsupported(self) -> str | None:
        """What the server says if it refuses this way for every prompt: it does not have what the way asks for."""
        sent = [reply for reply in self.replies if reply is not None]
        refused = [reply for reply in sent if reply.status in (400, 404, 405, 415, 422, 501)]
        return refused[0].error if sent and len(refused) == len(sent) else None


def choose_stop(text: str) -> str | None:
    """A stop string from the middle of a text, which it cuts at the place that it was taken from; None for a short text.

    It holds a space inside where possible, so that it lies across two tokens: where that is handled worst.
    """
    if len(text) < _TOO_LITTLE:
        return None
    places = range(len(text) * 2 // 5, len(text) - STOP_LENGTH + 1)
    found = [text[place : place + STOP_LENGTH] for place in places if _cuts_at(text, place)]
    across = [stop for stop in found if any(character.isspace() for character in stop[1:-1])]
    return next(iter(across or found), None)


def _cuts_at(text: str, place: int) -> bool:
    stop = text[place : place + STOP_LENGTH]
    return text.find(stop) == place and "\ufffd" not in stop and not stop[0].isspace() and not stop[-1].isspace()


def compare_texts(
    expected: Answered,
    got: Answered,
    section: Section,
    near_tie: float,
    tokens: Sequence[Sequence[ScoredToken] | None],
    name: str | None = None,
) -> WayFinding:
    """Texts that should be equal. tokens: of the expected texts, by prompt, as far as they are known."""
    partings = []
    compared = 0
    for prompt, scored in enumerate(tokens):
        wanted, text = expected.text(prompt), got.text(prompt)
        if wanted is not None and text is not None:
            compared += 1
            fork = find_fork(wanted, text, near_tie, scored)
            if fork is not None:
                partings.append(Parting(prompt=prompt, fork=fork))
    return _finding(got, section, name, compared, partings=tuple(partings))


def compare_stops(
    expected: Answered,
    got: Answered,
    stops: Sequence[str | None],
    near_tie: float,
    tokens: Sequence[Sequence[ScoredToken] | None],
) -> WayFinding:
    """Texts that a stop string should cut exactly. A text that parts before the cut is no fault of the stop."""
    partings, faults = [], []
    compared = 0
    for prompt, stop in enumerate(stops):
        whole, text = expected.text(prompt), got.text(prompt)
        if stop is None or whole is None or text is None:
            continue
        compared += 1
        cut = whole[: whole.index(stop)]
        if text == cut:
            continue
        if text.startswith(cut) or cut.startswith(text):
            ends = {"expected": cut[-_ENDS_SHOWN:], "got": text[max(len(cut) - _ENDS_SHOWN, 0) :][: 2 * _ENDS_SHOWN]}
            faults.append(StopFault(prompt=prompt, stop=stop, **ends))
        else:
            fork = find_fork(cut, text, near_tie, tokens[prompt])
            assert fork is not None
            partings.append(Parting(prompt=prompt, fork=fork))
    return _finding(got, "stops", None, compared, partings=tuple(partings), stop_faults=tuple(faults))


def compare_logprobs(left: Answered, right: Answered, allowed: float, name: str) -> LogprobFinding:
    """Of the tokens that both took, until they part."""
    known = [
        (prompt, a.tokens, b.tokens)
        for prompt, (a, b) in enumerate(zip(left.replies, right.replies))
        if a is not None and b is not None and a.tokens is not None and b.tokens is not None
    ]
    if not known:
        return LogprobFinding(name=name, unsupported="the server gives none")
    if all(is_after_sampling(a) and is_after_sampling(b) for _, a, b in known):
        return LogprobFinding(name=name, unsupported="they are of the choice, not of the model: all are 0")
    differences = [
        (difference, prompt, token)
        for prompt, a, b in known
        for token, difference in enumerate(logprob_differences(a, b))
    ]
    largest, prompt, token = max(differences, default=(0.0, 0, 0))
    found = LogprobFinding(name=name, tokens=len(differences), largest_difference=largest, allowed=allowed)
    return replace(found, prompt=prompt, token=token) if largest > 0 else found


def _finding(
    got: Answered,
    section: Section,
    name: str | None,
    compared: int,
    partings: tuple[Parting, ...] = (),
    stop_faults: tuple[StopFault, ...] = (),
) -> WayFinding:
    unsupported = got.unsupported
    errors = [reply for reply in got.replies if reply is not None and reply.error is not None]
    failures = [] if unsupported else [reply for reply in errors if not reply.busy]
    return WayFinding(
        section=section,
        name=name or got.way.name,
        compared=compared,
        partings=partings,
        stop_faults=stop_faults,
        busy=sum(reply.busy for reply in errors),
        failed=len(failures),
        error=failures[0].error if failures else None,
        unsupported=unsupported,
        company=got.way.company,
        overlapped=got.overlapped,
    )
