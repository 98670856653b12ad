"""The whole check: ask in every way, compare, and say what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.analysis.server_check.client import Endpoint, Question, ScoredToken, ServedModel, ServerClient
from selfspec.analysis.server_check.company import ask_in_groups
from selfspec.analysis.server_check.findings import LogprobFinding, Section, ServerFindings, WayFinding
from selfspec.analysis.server_check.judging import (
    Answered,
    choose_stop,
    compare_logprobs,
    compare_stops,
    compare_texts,
)
from selfspec.analysis.server_check.plan import (
    ALONE,
    ALONE_LOGPROBS,
    COMPANIES,
    EXAMPLE_PROMPTS,
    OTHER_SEED,
    SEEDED,
    Way,
    plain_ways,
    ways,
)

_SEEDS = (1234, 4321)
_NO_SUCH_ROUTE = (404, 405, 501)
_CHOOSING = 2  # requests at most that find out which route a server has


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """prompts: what is asked. max_tokens: of every text. companies: numbers of requests at once.

    near_tie: largest difference in nats of the log probabilities of two tokens that rounding may have exchanged.
    logprob_tolerance: largest difference in nats of one token's log probability between two ways to ask.
    expect_seeds: the server promises that a seed repeats a text. endpoint: None takes completions where there are any.
    """

    prompts: tuple[str, ...] = EXAMPLE_PROMPTS
    max_tokens: int = 48
    companies: tuple[int, ...] = COMPANIES
    near_tie: float = 0.25
    logprob_tolerance: float = 0.1
    expect_seeds: bool = False
    endpoint: Endpoint | None = None
    api_key: str = "none"
    timeout_seconds: float = 120.0

    def num_requests(self, plain: bool) -> int:
        """The most that the check sends. plain: whether there is a model without speculation to compare with."""
        asked = [*ways(self.companies), *(plain_ways(self.companies) if plain else ())]
        return sum(way.num_requests(len(self.prompts)) for way in asked) + _CHOOSING


def check_server(
    served: ServedModel,
    plain: ServedModel | None = None,
    settings: CheckSettings | None = None,
    advance: Callable[[str], None] = lambda label: None,
) -> ServerFindings:
    """Ask a server for the same texts in many ways, and compare them.

    plain: the same model without speculation, on this server or another. advance: called after every request.
    Raises ValueError if a server cannot be asked, or answers no prompt when it is asked alone.
    """
    settings = settings or CheckSettings()
    asked = _Asked(served, settings, ways(settings.companies), advance)
    sent = asked.sent
    found = [*_greedy(asked, "greedy"), *_stops(asked), *_seeded(asked)]
    logprobs = [*_logprobs(asked, settings)]
    if plain is not None:
        other = _Asked(plain, settings, plain_ways(settings.companies), advance, asked.endpoint)
        sent += other.sent
        found += _greedy(other, "without speculation")
        found.append(
            compare_texts(
                other.of(ALONE), asked.of(ALONE), "speculation", settings.near_tie, other.tokens, "on beside off, alone"
            )
        )
        logprobs.append(
            compare_logprobs(
                other.of(ALONE_LOGPROBS),
                asked.of(ALONE_LOGPROBS),
                settings.logprob_tolerance,
                "speculation on beside off",
            )
        )
    return ServerFindings(
        url=served.url,
        model=served.model,
        plain=None
        if plain is None
        else f"{plain.model} at {plain.url}" + (f" with {dict(plain.fields)}" if plain.fields else ""),
        endpoint=asked.endpoint,
        prompts=len(settings.prompts),
        max_tokens=settings.max_tokens,
        requests=sent,
        characters=sum(len(asked.of(ALONE).text(index) or "") for index in range(len(settings.prompts))),
        near_tie=settings.near_tie,
        expect_seeds=settings.expect_seeds,
        ways=tuple(found),
        logprobs=tuple(logprobs),
        seed_matters=_seed_matters(asked),
    )


class _Asked:
    """One model's answers, in every way. tokens: of its greedy texts, by prompt, if it gives log probabilities."""

    def __init__(
        self,
        served: ServedModel,
        settings: CheckSettings,
        wanted: Sequence[Way],
        advance: Callable[[str], None],
        endpoint: Endpoint | None = None,
    ) -> None:
        self.settings, self.ways, self.sent = settings, wanted, 0
        self._advance = advance
        self._answers: dict[Way, Answered] = {}
        self.stops: list[str | None] = []
        client = ServerClient(served, settings.api_key, settings.timeout_seconds)
        try:
            self.endpoint = endpoint or settings.endpoint or self._choose_endpoint(client)
            for way in wanted:
                self._answers[way] = self._ask(client, way)
                if way == ALONE:
                    self._begin(client)
        finally:
            client.close()
        replies = self.of(ALONE_LOGPROBS).replies
        self.tokens: list[Sequence[ScoredToken] | None] = [None if reply is None else reply.tokens for reply in replies]

    def of(self, way: Way) -> Answered:
        return self._answers[way]

    def of_kind(self, kind: str) -> list[Answered]:
        return [self._answers[way] for way in self.ways if way.kind == kind]

    def _begin(self, client: ServerClient) -> None:
        """With the texts of requests alone: whether there is anything to compare, and where to stop them."""
        answered = self.of(ALONE)
        count = range(len(self.settings.prompts))
        texts = [answered.text(index) for index in count]
        if not any(texts):
            errors = [reply.error for reply in answered.replies if reply is not None and reply.error is not None]
            said = errors[0] if errors else "empty texts"
            raise ValueError(f"{client.served.url} gives no text for model {client.served.model!r}: {said}")
        self.stops = [None if text is None else choose_stop(text) for text in texts]

    def _choose_endpoint(self, client: ServerClient) -> Endpoint:
        first = self.settings.prompts[0]
        reply = client.ask(Question(endpoint="completions", prompt=first, max_tokens=1))
        self._count("asking which routes there are")
        return "chat" if reply.status in _NO_SUCH_ROUTE else "completions"

    def _ask(self, client: ServerClient, way: Way) -> Answered:
        asked = {}
        for index, prompt in enumerate(self.settings.prompts):
            stop = self.stops[index] if way.kind == "stop" else None
            if way.kind == "stop" and stop is None:
                continue
            asked[index] = Question(
                endpoint=self.endpoint,
                prompt=prompt,
                max_tokens=self.settings.max_tokens,
                seed=_SEEDS[way.seed] + index if way.kind == "seed" else None,
                stop=stop,
                streamed=way.streamed,
                logprobs=way.logprobs,
            )
        label = f"{way.kind}: {way.name}"
        replies, overlapped = ask_in_groups(client.ask, [*asked.values()], way.company, lambda: self._count(label))
        by_prompt = dict(zip(asked, replies))
        every = range(len(self.settings.prompts))
        return Answered(way=way, replies=tuple(by_prompt.get(index) for index in every), overlapped=overlapped)

    def _count(self, label: str) -> None:
        self.sent += 1
        self._advance(label)


def _greedy(asked: _Asked, section: Section) -> list[WayFinding]:
    alone, *others = asked.of_kind("greedy")
    return [compare_texts(alone, other, section, asked.settings.near_tie, asked.tokens) for other in others]


def _stops(asked: _Asked) -> list[WayFinding]:
    alone, tie = asked.of(ALONE), asked.settings.near_tie
    return [compare_stops(alone, answered, asked.stops, tie, asked.tokens) for answered in asked.of_kind("stop")]


def _seeded(asked: _Asked) -> list[WayFinding]:
    unknown = [None] * len(asked.settings.prompts)  # a draw is no near-tie, however likely the tokens
    alone, *others = (answered for answered in asked.of_kind("seed") if answered.way != OTHER_SEED)
    return [compare_texts(alone, other, "seeds", 0.0, unknown) for other in others]


def _seed_matters(asked: _Asked) -> bool | None:
    first, other = asked.of(SEEDED), asked.of(OTHER_SEED)
    pairs = [(first.text(index), other.text(index)) for index in range(len(asked.settings.prompts))]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return any(a != b for a, b in known) if known else None


def _logprobs(asked: _Asked, settings: CheckSettings) -> list[LogprobFinding]:
    alone = asked.of(ALONE_LOGPROBS)
    others = [answered for answered in asked.of_kind("greedy") if answered.way.logprobs and answered is not alone]
    return [
        compare_logprobs(
            alone, other, settings.logprob_tolerance, f"alone beside {other.way.name.removesuffix(', logprobs')}"
        )
        for other in others
    ]
