"""A server over several processes: rank 0 talks to clients, and tells the others before every step who joins and who goes.

Their engines then take the same steps on the same texts. What they get of a text is its prompt, processors, stops and the
name of its policy. What a processor holds that every process has by itself is named, not sent. While nobody is served they
wait, for as long as that takes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from layerskip_models.parallel.rank_watch import RankWatch
from layerskip_models.parallel.ranks import RankError, Ranks
from layerskip_models.parallel.sharded_model import ShardedModel
from policies import Policy, parse_policy
from selfspec.cache.copy_index import CopyStore
from selfspec.cache.prefix_cache import Owner
from selfspec.engine.calibrate import measured_cost
from selfspec.engine.engine import BoundRequest, Engine, Progress
from selfspec.engine.request import Request
from selfspec.engine.stopping import StopConditions
from selfspec.generator import SelfSpecGenerator
from selfspec.pacer.inference import PreVerifiers

_KEPT = 64  # policies that followers know beside the server's own


@dataclass(frozen=True, slots=True)
class _Told:
    """A policy. key: its number on rank 0, 0 for the server's own. state: what it has learned, for one not told of before.

    pass_seconds: what rank 0 takes for passes of the pre-verifier over blocks of so many drafts, as far as it knows.
    """

    key: int
    name: str
    state: dict[str, Any] | None
    pass_seconds: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Joins:
    """A text, as it is told to the other ranks. following: as in `Engine.join`. copies: whether it copies from the server's
    texts."""

    prompt: list[int]
    processors: bytes
    eos: frozenset[int]
    num_criteria: int
    max_new_tokens: int
    samples: bool
    policy: _Told
    copies: bool
    owner: Owner
    following: int


@dataclass(slots=True)
class _News:
    """What has happened on rank 0 since the step before. closes: this engine takes no more steps. ends: none will."""

    events: list[_Joins | int] = field(default_factory=list)
    closes: bool = False
    ends: bool = False


class Rank0Engine(Engine):
    """Rank 0's engine: it does what `Engine` does, and tells the others first. For one thread, which alone uses the model.

    own: the server's policy. told: other policies that the followers know, by their numbers; of the last `_KEPT`.
    preverifiers: the model's. shared: what processors may hold and the followers have, too.
    """

    def __init__(
        self,
        ranks: Ranks,
        own: Policy,
        told: OrderedDict[int, Policy],
        preverifiers: PreVerifiers,
        shared: Sequence[object],
    ) -> None:
        super().__init__()
        self._ranks, self._own, self._told, self._news = ranks, own, told, _News()
        self._preverifiers, self._shared = preverifiers, shared
        self._stepping = self._alone = False

    def join(self, checked: BoundRequest, following: int = 0) -> int:
        """As `Engine.join`. The text's place is taken at once; the others hear of it in the same order.

        Raises ValueError for a text whose processors cannot be sent to another process.
        """
        request = checked.request
        try:
            processors = _packed(request.processors, self._shared)
        except Exception as error:
            raise ValueError(
                "this request's logits processors cannot be sent to the other processes that hold the model: leave them out, "
                "or serve the model from one process"
            ) from error
        self._news.events.append(
            _Joins(
                prompt=request.prompt.tolist(),
                processors=processors,
                eos=request.stops.eos,
                num_criteria=len(request.stops.criteria),
                max_new_tokens=request.stops.max_new_tokens,
                samples=request.generator is not None,
                policy=self._described(checked.policy),
                copies=request.copy_from is not None,
                owner=request.owner,
                following=following,
            )
        )
        self._tell()
        return super().join(checked, following)

    def _described(self, policy: Policy) -> _Told:
        if policy is self._own:
            return _Told(0, policy.name, None)
        key = next((key for key, known in self._told.items() if known is policy), None)
        if key is None:
            key = max(self._told, default=0) + 1
            _keep(self._told, key, policy)
            return _Told(key, policy.name, policy.state(), dict(self._preverifiers.pass_seconds))
        self._told.move_to_end(key)
        return _Told(key, policy.name, None)

    def cancel(self, ticket: int) -> None:
        if ticket in self._slots and not self._stepping:
            self._news.events.append(ticket)
        super().cancel(ticket)

    def step(self) -> list[Progress]:
        self._tell()
        self._stepping = True  # texts that end by themselves end everywhere
        try:
            return super().step()
        except RankError:
            self._alone = True
            raise
        finally:
            self._stepping = False

    def close(self) -> None:
        super().close()
        self._news.closes = True
        if not self._alone:
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, _News()
        try:
            self._ranks.from_first(lambda: news)
        except RankError:
            self._alone = True  # nobody listens any more: waiting once was enough
            raise


def _keep(policies: OrderedDict[int, Policy], key: int, policy: Policy) -> None:
    """Of both sides, in the same order."""
    policies[key] = policy
    if len(policies) > _KEPT:
        policies.popitem(last=False)


class _Packer(pickle.Pickler):
    """Names what is shared by its number."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, value: object) -> int | None:
        return next((number for number, known in enumerate(self._shared) if known is value), None)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> object:
        return self._shared[number]


def _packed(processors: LogitsProcessorList, shared: Sequence[object]) -> bytes:
    file = io.BytesIO()
    _Packer(file, shared).dump(processors)
    return file.getvalue()


def leading_engine(
    generator: SelfSpecGenerator, own: str | None, shared: Sequence[object] = ()
) -> Callable[[], Engine]:
    """What makes a server's engines: they lead those of other processes if the model is divided over some.

    own: name of the server's policy. shared: what logits processors may hold that each process has by itself, such as a
    vocabulary; `follow` is given the same, in the same order.
    """
    model = generator.model
    if not isinstance(model, ShardedModel):
        return Engine
    ranks, policy, told = model.ranks, generator.resolve_policy(own), OrderedDict[int, Policy]()
    return lambda: Rank0Engine(ranks, policy, told, generator.load_preverifier, shared)


def watch_followers(generator: SelfSpecGenerator) -> RankWatch | None:
    """A watch over the other ranks, which give signs of life while they follow; None where the model is in one process."""
    model = generator.model
    return RankWatch(model.ranks.size, model.ranks.timeout) if isinstance(model, ShardedModel) else None


def end_followers(generator: SelfSpecGenerator) -> None:
    """Let the other ranks leave `follow`. Does nothing where the model is in one process."""
    if isinstance(generator.model, ShardedModel):
        generator.model.ranks.from_first(lambda: _News(ends=True))


def follow(
    generator: SelfSpecGenerator, own: str | None, copies: CopyStore | None = None, shared: Sequence[object] = ()
) -> None:
    """Take rank 0's steps until it ends.

    own: name of the server's policy. copies: what its drafts may be copied from beside their own texts. shared: as in
    `leading_engine`.
    """
    model = generator.model
    assert isinstance(model, ShardedModel)
    engine, policies = Engine(), _Policies(generator, own)
    while True:
        news = model.ranks.from_first(_News)
        if news.ends:
            engine.close()
            return
        joined = False
        for event in news.events:
            try:
                if isinstance(event, int):
                    engine.cancel(event)
                else:
                    joined = True
                    checked = _checked(generator, event, policies.find(event.policy), copies, shared)
                    engine.join(checked, event.following)
            except RankError:
                raise
            except Exception:  # rank 0 has the same error, and answers for it
                continue
        if news.closes:
            engine.close()
            engine = Engine()
        elif not joined:
            _step(engine)


def _step(engine: Engine) -> None:
    try:
        engine.step()
    except RankError:
        raise
    except Exception:  # as on rank 0, whose engine closes now
        return


class _Policies:
    """A follower's counterparts of rank 0's policies."""

    def __init__(self, generator: SelfSpecGenerator, own: str | None) -> None:
        self._generator, self._own = generator, generator.resolve_policy(own)
        self._known: OrderedDict[int, Policy] = OrderedDict()

    def find(self, told: _Told) -> Policy:
        """The counterpart; a new one for a policy that was not told of before."""
        if told.key == 0:
            return self._own
        if told.state is None:
            self._known.move_to_end(told.key)
            return self._known[told.key]
        generator = self._generator
        generator.load_preverifier.pass_seconds.update(told.pass_seconds)
        policy = parse_policy(
            told.name,
            num_layers=generator.model.num_layers,
            measure=partial(measured_cost, generator.model, generator.runner),
            preverifier=generator.load_preverifier,
        )
        policy.restore(told.state)
        _keep(self._known, told.key, policy)
        return policy


def _checked(
    generator: SelfSpecGenerator, told: _Joins, policy: Policy, copies: CopyStore | None, shared: Sequence[object]
) -> BoundRequest:
    """The same call as rank 0's. Its random numbers come when it joins, and its criteria are rank 0's alone."""
    model = generator.model
    request = Request(
        prompt=torch.tensor(told.prompt, dtype=torch.long),
        processors=_Unpacker(io.BytesIO(told.processors), shared).load(),
        stops=StopConditions(
            eos=told.eos,
            criteria=StoppingCriteriaList([_never] * told.num_criteria),
            max_new_tokens=told.max_new_tokens,
        ),
        generator=torch.Generator(device=model.device) if told.samples else None,
        copy_from=copies if told.copies else None,
        owner=told.owner,
    )
    (checked,) = generator.check_prepared([request], policy=policy)
    return checked


def _never(prefix: object, scores: object) -> bool:
    """In the place of rank 0's criterion."""
    return False
