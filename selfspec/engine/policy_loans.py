"""Policies are lent to one call at a time.

Policies keep state: what they have learned, and what they know of the current text and round. If two calls used one state at
the same time, each would decide by the other's drafts. The output would still be the model's own, but a stopping policy that
finds another round than the one it started may fail. A call therefore borrows a policy (`lend`). A second call that comes
meanwhile gets a copy, unless the policy wants to learn from all texts of a batch together (`BatchPolicies`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from weakref import WeakValueDictionary

from layerskip_models.fork_safe import fork_safe
from policies import Policy


class _Loan:
    """One call's use of a policy. round: held while the policy is at work, so that nobody copies it half changed."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.thread = policy, threading.get_ident()
        self.round = threading.RLock()  # a logits processor may itself make a call


_lent: WeakValueDictionary[int, _Loan] = WeakValueDictionary()  # by the id of an exit or stopping policy
_lock = fork_safe(threading.RLock())  # re-entered when a stream is finalised by the garbage collector


def _forget_other_threads() -> None:
    """In a forked child: calls of the parent's other threads do not go on there, and never give back what they borrowed."""
    for key, loan in [*_lent.items()]:
        if loan.thread != threading.get_ident():
            del _lent[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


@contextmanager
def lend(policy: Policy) -> Iterator[tuple[Policy, threading.RLock]]:
    """Lend the policy to one call, with a lock that the call holds during each of its rounds.

    It is the policy itself, or a copy if another call is using it (or another `Policy` of the same parts). A copy knows what
    the policy has learned so far; what it learns itself is lost. Raises RuntimeError for a policy that cannot be copied.
    """
    parts = [part for part in (policy.exit, policy.stopping) if part is not None]
    with _lock:
        busy = next((_lent[id(part)] for part in parts if id(part) in _lent), None)
        if busy is None:
            own = _Loan(policy)
            for part in parts:
                _lent[id(part)] = own
    if busy is not None:
        with busy.round:
            own = _Loan(_copied(policy))
        parts = []
    try:
        yield own.policy, own.round
    finally:
        with _lock:
            for part in parts:
                _lent.pop(id(part), None)


class BatchPolicies:
    """Lends policies to the texts of one engine. Texts with the same policy learn in one state if the policy wants that."""

    def __init__(self) -> None:
        self._shared: dict[int, _SharedLoan] = {}

    @contextmanager
    def lend(self, policy: Policy) -> Iterator[tuple[Policy, threading.RLock]]:
        """As the function `lend`, for one text of the batch."""
        if not policy.learns_together:
            with lend(policy) as found:
                yield found
            return
        shared = self._shared.get(id(policy))
        if shared is None:
            held = ExitStack()
            shared = self._shared[id(policy)] = _SharedLoan(*held.enter_context(lend(policy)), held)
        shared.texts += 1
        try:
            yield shared.policy.clone_for_sequence(), shared.round
        finally:
            shared.texts -= 1
            if not shared.texts:
                del self._shared[id(policy)]
                shared.held.close()


@dataclass(slots=True, eq=False)
class _SharedLoan:
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
