"""What a check of a server found, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from selfspec.analysis.server_check.findings import LogprobFinding, Parting, Section, ServerFindings, WayFinding

SHOWN_FORKS = 8
"""Differences that are listed; JSON has all."""
_TITLES: dict[Section, str] = {
    "greedy": "greedy texts, beside the same request alone",
    "without speculation": "the same without speculation",
    "speculation": "greedy texts with speculation, beside those without",
    "stops": "stop strings, beside the text cut by hand",
    "seeds": "seeded samples, beside the same request alone",
}


def finding_lines(found: ServerFindings) -> list[str]:
    """Everything for people, the verdict last."""
    lines = [
        f"{found.model} at {found.url} ({found.endpoint}): {found.requests} requests, {found.prompts} prompts, "
        f"at most {found.max_tokens} tokens each"
    ]
    if found.plain is not None:
        lines.append(f"without speculation: {found.plain}")
    for section, title in _TITLES.items():
        ways = [way for way in found.ways if way.section == section]
        if ways:
            note = _seed_note(found) if section == "seeds" else ""
            lines += [f"{title}{note}", *(_way_line(way, section) for way in ways)]
    lines += ["log probabilities of the chosen tokens", *map(_logprob_line, found.logprobs)]
    lines += _difference_lines(found)
    if found.company_overlapped is False:
        lines.append("note: no two answers came at the same time; the server works on one request after another")
    return [*lines, f"verdict: {found.verdict}: {_verdict(found)}"]


def _seed_note(found: ServerFindings) -> str:
    if found.seed_matters is False:
        return " (another seed gives the same texts: seed or temperature has no effect)"
    return "" if found.expect_seeds else " (not in the verdict: not every server promises this)"


def _way_line(way: WayFinding, section: Section) -> str:
    if way.unsupported is not None:
        return f"  -        {way.name}: not supported ({way.unsupported[:80]})"
    marks = "DIFFERS" if way.differing else "ok" if way.compared and not (way.busy or way.failed) else "?"
    said = f"{way.differing} of {way.compared} differ" if way.differing else f"{way.compared} equal"
    if way.near_ties:
        said += f", {way.near_ties} of them at a near-tie"
    if way.busy:
        said += f"; {way.busy} refused as too many"
    if way.failed:
        said += f"; {way.failed} failed ({(way.error or '')[:80]})"
    return f"  {marks:8} {way.name}: {said}"


def _logprob_line(found: LogprobFinding) -> str:
    if found.unsupported is not None:
        return f"  -        {found.name}: {found.unsupported}"
    mark = "ok" if found.passed else "DIFFERS"
    place = "" if found.prompt is None or found.token is None else f" (prompt {found.prompt + 1}, token {found.token})"
    return (
        f"  {mark:8} {found.name}: {found.tokens} tokens, largest difference {found.largest_difference:.2g}{place}, "
        f"allowed {found.allowed:g}"
    )


def _difference_lines(found: ServerFindings) -> list[str]:
    every = [*_differences(found)]
    if not every:
        return []
    more = [f"  and {len(every) - SHOWN_FORKS} more (--json lists all)"] if len(every) > SHOWN_FORKS else []
    return ["where texts part (expected / got)", *every[:SHOWN_FORKS], *more]


def _differences(found: ServerFindings) -> Iterator[str]:
    for way in found.ways:
        for parting in way.partings:
            yield f"  {_TITLES[way.section].split(',')[0]}, {way.name}: {_parting(parting)}"
        for fault in way.stop_faults:
            yield (
                f"  stop {fault.stop!r}, {way.name}: prompt {fault.prompt + 1} should end with {fault.expected!r}, "
                f"has {fault.got!r}"
            )


def _parting(parting: Parting) -> str:
    fork = parting.fork
    place = f"character {fork.character}" if fork.token is None else f"token {fork.token}"
    tie = ", near-tie" if fork.near_tie else ""
    return (
        f"prompt {parting.prompt + 1}, {place}: {_scored(fork.expected, fork.expected_logprob)} / "
        f"{_scored(fork.got, fork.got_logprob)}{tie}"
    )


def _scored(text: str, logprob: float | None) -> str:
    shown = repr(text) if text else "the end"
    return shown if logprob is None else f"{shown} ({logprob:.3f})"


def _verdict(found: ServerFindings) -> str:
    if found.verdict == "differs":
        return "; ".join(_reasons(found))
    return {
        "exact": "no text depends on how it was asked for",
        "near-ties": f"texts differ, only where two tokens are within {found.near_tie:g} nats: the numbers depend on company "
        "or speculation",
        "incomplete": "nothing differs, but not every request was answered, or no seed has an effect",
    }[found.verdict]


def _reasons(found: ServerFindings) -> Iterator[str]:
    judged = [*found.judged()]
    ties = [parting.fork.near_tie for way in judged if way.section != "seeds" for parting in way.partings]
    if False in ties:
        yield "greedy texts differ by more than a near-tie"
    if None in ties:
        yield "greedy texts differ, and no log probabilities say whether at a near-tie"
    if any(way.stop_faults for way in judged):
        yield "stop strings do not cut exactly"
    if not all(score.passed for score in found.logprobs):
        yield "log probabilities differ"
    if any(way.section == "seeds" and way.differing for way in judged):
        yield "seeds do not repeat a text"
