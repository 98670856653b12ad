"""A server over several processes: rank 0 talks to clients and tells the workers before every step who joins and who leaves.

The workers' engines then take the same steps on the same texts. A worker receives a text's request and the name of its
policy. Objects that every process has anyway are sent by number or name. While no request runs, the workers wait.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import StoppingCriteriaList

from layerskip_models.parallel.rank_watch import RankWatch
from layerskip_models.parallel.ranks import RankError, Ranks
from policies import Policy
from selfspec.cache.copy_index import CopyStore
from selfspec.engine.batch_slot import BoundRequest
from selfspec.engine.engine import Engine
from selfspec.engine.policy_store import PolicyStore, make_policy
from selfspec.engine.request import Request
from selfspec.engine.results import StepOutput
from selfspec.generator import SelfSpecGenerator
from selfspec.pacer.inference import PreVerifiers

_KEPT = 64
"""Policies that the workers keep, besides the server's own. Rank 0 and the workers forget old ones in the same order."""


@dataclass(frozen=True, slots=True)
class PolicyMessage:
    """A policy.

    key: its `id` on rank 0, 0 for the server's own. state: what it has learned, if the workers do not know it yet.
    pass_seconds: rank 0's measured seconds for a pass of the pre-verifier, by number of drafts.
    """

    key: int
    name: str
    state: dict[str, Any] | None
    pass_seconds: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinMessage:
    """A text that joins. request: a packed `Request`. following: as in `Engine.join`."""

    request: bytes
    policy: PolicyMessage
    following: int


@dataclass(slots=True)
class StepMessage:
    """What has happened on rank 0 since the last step: texts that joined, tickets that were cancelled.

    closes: this engine takes no more steps. ends: no engine does.
    """

    events: list[JoinMessage | int] = field(default_factory=list)
    closes: bool = False
    ends: bool = False


class Rank0Engine(Engine):
    """Rank 0's engine: it does what `Engine` does, and tells the workers first. Only one thread may use it and the model.

    own: the server's policy. told: the other policies that the workers know, by their `id`. preverifiers: the
    model's. shared: objects that processors may hold and every worker has too.
    """

    def __init__(
        self,
        ranks: Ranks,
        own: Policy,
        told: PolicyStore,
        preverifiers: PreVerifiers,
        shared: Sequence[object],
    ) -> None:
        super().__init__()
        self._ranks, self._own, self._told, self._message = ranks, own, told, StepMessage()
        self._preverifiers, self._shared = preverifiers, shared
        self._stepping = self._alone = False

    def join(self, checked: BoundRequest, following: int = 0) -> int:
        """As `Engine.join`. The workers hear of texts in the same order.

        Raises ValueError for a text whose processors cannot be sent to another process.
        """
        try:
            request = _packed(checked.request, self._shared)
        except Exception as error:
            raise ValueError(
                "this request's logits processors cannot be sent to the other processes that hold the model: leave them out, "
                "or serve the model from one process"
            ) from error
        self._message.events.append(JoinMessage(request, self._described(checked.policy), following))
        self._tell()
        return super().join(checked, following)

    def _described(self, policy: Policy) -> PolicyMessage:
        if policy is self._own:
            return PolicyMessage(0, policy.name, None)
        key = id(policy)
        known = key in self._told
        self._told.keep(key, policy)
        if known:
            return PolicyMessage(key, policy.name, None)
        return PolicyMessage(key, policy.name, policy.state(), dict(self._preverifiers.pass_seconds))

    def cancel(self, ticket: int) -> None:
        if ticket in self._slots and not self._stepping:
            self._message.events.append(ticket)
        super().cancel(ticket)

    def step(self) -> list[StepOutput]:
        self._tell()
        self._stepping = True  # texts that end in a step end on every rank
        try:
            return super().step()
        except RankError:
            self._alone = True
            raise
        finally:
            self._stepping = False

    def close(self) -> None:
        super().close()
        self._message.closes = True
        if not self._alone:
            self._tell()

    def _tell(self) -> None:
        message, self._message = self._message, StepMessage()
        try:
            self._ranks.from_first(lambda: message)
        except RankError:
            self._alone = True  # do not wait for the workers a second time
            raise


_GENERATOR, _COPIES = "generator", "copies"
"""What stands for a random generator, whose state is sent when the text joins, and for the server's texts to copy from."""


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, value: object) -> int | str | None:
        if isinstance(value, (torch.Generator, CopyStore)):
            return _GENERATOR if isinstance(value, torch.Generator) else _COPIES
        return next((number for number, known in enumerate(self._shared) if known is value), None)


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: bytes, shared: Sequence[object], copies: CopyStore | None, device: torch.device) -> None:
        super().__init__(io.BytesIO(packed))
        self._shared, self._copies, self._device = shared, copies, device

    def persistent_load(self, name: int | str) -> object:
        if isinstance(name, int):
            return self._shared[name]
        return torch.Generator(self._device) if name == _GENERATOR else self._copies


def _packed(request: Request, shared: Sequence[object]) -> bytes:
    """What a worker needs of a request. Only rank 0 evaluates stopping criteria."""
    never = StoppingCriteriaList([_never] * len(request.stops.criteria))
    stops = replace(request.stops, criteria=never, clocks=())
    file = io.BytesIO()
    _Packer(file, shared).dump(replace(request, stops=stops, watch_prompt=None))
    return file.getvalue()


def _never(prefix: object, scores: object) -> bool:
    """Stands for a stopping criterion of rank 0."""
    return False


def rank0_engines(generator: SelfSpecGenerator, own: str | None, shared: Sequence[object] = ()) -> Callable[[], Engine]:
    """What makes a server's engines: `Rank0Engine` if the model is divided over processes, else `Engine`.

    own: name of the server's policy. shared: objects that logits processors may hold and each process has, such as a
    vocabulary; `run_worker` gets its own ones in the same order.
    """
    ranks = generator.model.ranks
    if ranks is None:
        return Engine
    policy, told = generator.resolve_policy(own), PolicyStore(most=_KEPT)
    return lambda: Rank0Engine(ranks, policy, told, generator.load_preverifier, shared)


def watch_workers(generator: SelfSpecGenerator) -> RankWatch | None:
    """A watch over the workers, which give signs of life; None if the model is in one process."""
    ranks = generator.model.ranks
    return None if ranks is None else RankWatch(ranks.size, ranks.timeout)


def end_workers(generator: SelfSpecGenerator) -> None:
    """Make `run_worker` return on all workers. Does nothing if the model is in one process."""
    if generator.model.ranks is not None:
        generator.model.ranks.from_first(lambda: StepMessage(ends=True))


def run_worker(
    generator: SelfSpecGenerator, own: str | None, copies: CopyStore | None = None, shared: Sequence[object] = ()
) -> None:
    """Take the same steps as rank 0 until it ends.

    own: name of the server's policy. copies: the server's texts to copy drafts from. shared: as for `rank0_engines`.
    """
    ranks = generator.model.ranks
    assert ranks is not None
    engine, policies = Engine(), _Policies(generator, own)
    while True:
        message = ranks.from_first(StepMessage)
        if message.ends:
            engine.close()
            return
        joined = False
        for event in message.events:
            with _reported_by_rank0():
                if isinstance(event, int):
                    engine.cancel(event)
                else:
                    joined = True
                    request = _Unpacker(event.request, shared, copies, generator.model.device).load()
                    (checked,) = generator.check_prepared([request], policy=policies.find(event.policy))
                    engine.join(checked, event.following)
        if message.closes:
            engine.close()
            engine = Engine()
        elif not joined:
            with _reported_by_rank0():
                engine.step()


@contextmanager
def _reported_by_rank0() -> Iterator[None]:
    """Ignores errors, but for a RankError: rank 0 has the same one, reports it, and closes its engine if it must."""
    try:
        yield
    except RankError:
        raise
    except Exception:
        pass


class _Policies:
    """A worker's counterparts of rank 0's policies."""

    def __init__(self, generator: SelfSpecGenerator, own: str | None) -> None:
        self._generator, self._own = generator, generator.resolve_policy(own)
        self._known = PolicyStore(most=_KEPT)

    def find(self, told: PolicyMessage) -> Policy:
        """The counterpart of a policy; a new one if the worker does not know it yet."""
        if told.key == 0:
            return self._own
        if told.state is None:
            return self._known[told.key]
        self._generator.load_preverifier.pass_seconds.update(told.pass_seconds)
        policy = make_policy(self._generator.bound, told.name)
        policy.restore(told.state)
        return self._known.keep(told.key, policy)
