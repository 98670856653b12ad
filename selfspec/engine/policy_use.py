"""A policy serves one call at a time; a call that comes meanwhile works with a copy of it.

Policies keep state: what they have learned, and what they know of the text and of the round at hand. Two calls at once in one
state would decide by each other's drafts. The text would still be the model's own, but a stopping rule that finds a round
other than the one it began may fail.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from weakref import WeakValueDictionary

from policies import Policy


class _Use:
    """One call's use of a policy. round: held while the policy is at work, so that nobody copies it half changed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.round = threading.RLock()  # a logits processor may itself make a call


_in_use: WeakValueDictionary[int, _Use] = WeakValueDictionary()  # by the id of an exit or stopping policy
_lock = threading.RLock()  # re-entered when a stream is finalised by the garbage collector


@contextmanager
def use(policy: Policy) -> Iterator[tuple[Policy, threading.RLock]]:
    """The policy for one call, and a lock that the call holds during each of its rounds.

    It is the policy itself, or a copy if another call is using it (or another `Policy` of the same parts). A copy knows what
    the policy has learned so far; what it learns itself is lost. Raises RuntimeError for a policy that cannot be copied.
    """
    parts = [part for part in (policy.exit, policy.stopping) if part is not None]
    with _lock:
        busy = next((_in_use[id(part)] for part in parts if id(part) in _in_use), None)
        if busy is None:
            own = _Use(policy)
            for part in parts:
                _in_use[id(part)] = own
    if busy is not None:
        with busy.round:
            own = _Use(_copied(policy))
        parts = []
    try:
        yield own.policy, own.round
    finally:
        with _lock:
            for part in parts:
                _in_use.pop(id(part), None)


class SharedPolicies:
    """What the texts of one engine use. Texts with the same policy learn in one state, where the policy wants that."""

    def __init__(self) -> None:
        self._shared: dict[int, _Shared] = {}

    @contextmanager
    def use(self, policy: Policy) -> Iterator[tuple[Policy, threading.RLock]]:
        """As `use`, for one text of the company."""
        if not policy.learns_together:
            with use(policy) as found:
                yield found
            return
        shared = self._shared.get(id(policy))
        if shared is None:
            held = ExitStack()
            shared = self._shared[id(policy)] = _Shared(*held.enter_context(use(policy)), held)
        shared.texts += 1
        try:
            yield shared.policy.clone_for_sequence(), shared.round
        finally:
            shared.texts -= 1
            if not shared.texts:
                del self._shared[id(policy)]
                shared.held.close()


@dataclass(slots=True, eq=False)
class _Shared:
    policy: Policy
    round: threading.RLock
    held: ExitStack
    texts: int = 0


def _copied(policy: Policy) -> Policy:
    try:
        return deepcopy(policy)
    except Exception as error:
        raise RuntimeError(
            f"policy {policy.name!r} is in use by another call, and copy.deepcopy cannot copy it ({error}): "
            "give each call that runs at the same time a policy of its own"
        ) from error
