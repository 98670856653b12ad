"""Policies by name, kept with what they have learned, and lent to one call at a time.

If two calls used one policy's state at the same time, each would decide by the other's drafts, and a stopping policy that
finds another round than the one it started may fail. A call therefore borrows a policy (`lend`). A second call that comes
meanwhile gets a copy, unless the policy wants to learn from all texts of a batch together (`BatchPolicies`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from weakref import WeakValueDictionary

from layerskip_models.draft_weights import bits_on_offer, make_for
from layerskip_models.fork_safe import fork_safe
from policies import CostModel, Policy, PreVerifier, autoregressive, check_exit_layer, parse_policy
from policies.auto.policy import AutoExit
from selfspec.defaults import DEFAULT_POLICY, fixed_setting
from selfspec.engine.expected_cost import expected_cost
from selfspec.engine.kept_costs import keep_cost
from selfspec.engine.model_source import BoundModel


class PolicyStore:
    """Keeps policies between calls, with what they have learned.

    default: for calls that name none; None for "auto". most: how many policies are kept, None for all. When there are more,
    the one that was not used for the longest time is forgotten.
    """

    def __init__(self, default: str | Policy | None = None, *, most: int | None = None) -> None:
        self.default, self._most = default, most
        self._lock = fork_safe(threading.Lock())
        self._kept: OrderedDict[Hashable, Policy] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __getitem__(self, key: Hashable) -> Policy:
        with self._lock:
            return self._keep(key, self._kept[key])

    def find(self, key: Hashable, make: Callable[[], Policy]) -> Policy:
        """Return the policy that is kept under this key, or make one and keep it."""
        with self._lock:  # two simultaneous first calls share one policy
            policy = self._kept.get(key)
            return self._keep(key, make() if policy is None else policy)

    def keep(self, key: Hashable, policy: Policy) -> Policy:
        """Keep a policy under this key, in place of an earlier one."""
        with self._lock:
            return self._keep(key, policy)

    def _keep(self, key: Hashable, policy: Policy) -> Policy:
        self._kept[key] = policy
        self._kept.move_to_end(key)
        if self._most is not None and len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return policy

    def resolve(
        self,
        bound: BoundModel,
        policy: str | Policy | None = None,
        exit_layer: int | None = None,
        num_speculations: int | None = None,
    ) -> Policy:
        """Find the policy of a call with these arguments, and make weights in fewer bits if it drafts with them.

        Raises ValueError for a policy that does not fit the model, or for arguments that contradict each other.
        """
        model = bound.model
        if exit_layer is not None:
            check_exit_layer(exit_layer, model.num_layers)
        if num_speculations == 0 and not isinstance(num_speculations, bool):
            return autoregressive(model.num_layers)
        if exit_layer is None and num_speculations is None:
            found = self.default if policy is None else policy
            if not isinstance(found, Policy):
                name = (DEFAULT_POLICY if model.num_layers > 1 else "ar") if found is None else found.strip()
                found = self._with_draft_weights(bound, name, (name, model.dtype, model.device))
            if found is not policy:  # what a policy of the caller's own observes is asked once a call, by its sequence
                make_for(model, bound.draft_weights, found.name, found.observes.bits)
            return found
        if policy is not None:
            raise ValueError("give policy, or exit_layer with num_speculations, not both")
        default_exit, default_length = fixed_setting(model.name, model.num_layers)
        chosen_exit = default_exit if exit_layer is None else exit_layer
        chosen_length = default_length if num_speculations is None else num_speculations
        return parse_policy(f"ls:{chosen_exit}-{chosen_length}", num_layers=model.num_layers)

    def _with_draft_weights(self, bound: BoundModel, name: str, key: Hashable) -> Policy:
        """Find the policy of this name. Where it chooses what to draft with, it knows the weights there are now."""
        model = bound.model
        policy = self.find(key, partial(make_policy, bound, name))
        chooser = policy.exit
        if not isinstance(chooser, AutoExit) or not chooser.takes_bits:
            return policy
        if tuple(sorted(model.drafters)) == chooser.bits:  # what can be made was asked then
            return policy
        made = make_policy(bound, name)
        assert isinstance(made.exit, AutoExit)
        made.exit.restore(chooser.state())
        return self.keep(key, made)


def make_policy(
    bound: BoundModel,
    name: str,
    *,
    measure: Callable[[], CostModel] | None = None,
    preverifier: Callable[[str | None], PreVerifier] | None = None,
) -> Policy:
    """Make a new policy for the model.

    measure, preverifier: as for `parse_policy`; by default what is known of the model's costs, and its loader of
    pre-verifiers.
    """
    offered = bits_on_offer(bound.model, bound.draft_weights)
    return parse_policy(
        name,
        num_layers=bound.model.num_layers,
        num_loops=bound.model.num_loops,
        measure=measure or partial(expected_cost, bound.model, bound.runner, offered),
        preverifier=preverifier or bound.preverifiers,
        draft_bits=tuple(sorted(bound.model.drafters)),
        offered_bits=offered,
    )


def keep_learned(bound: BoundModel, policy: Policy) -> None:
    """Keep what a text has shown of the model's costs, if it is news, for the next process."""
    cost = policy.exit.costs.learned() if isinstance(policy.exit, AutoExit) else None
    if cost is not None:
        keep_cost(bound.model, bound.runner, cost)


class _Loan:
    """A call's use of a policy, or that of all texts of an engine which learn in one state.

    round: held while the policy is at work, so that nobody copies it half changed. held, texts: for such an engine's loan.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, self.thread = policy, threading.get_ident()
        self.round = threading.RLock()  # a logits processor may itself make a call
        self.held, self.texts = ExitStack(), 0


_lent: WeakValueDictionary[int, _Loan] = WeakValueDictionary()  # by the id of an exit or stopping policy
_lock = fork_safe(threading.RLock())  # re-entered when a stream is finalised by the garbage collector


def _forget_other_threads() -> None:
    """In a forked child, end the loans of the parent's other threads: their calls do not go on there."""
    for key, loan in [*_lent.items()]:
        if loan.thread != threading.get_ident():
            del _lent[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


@contextmanager
def lend(policy: Policy) -> Iterator[_Loan]:
    """Lend the policy to one call, which holds the loan's lock during each of its rounds.

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
        parts = []
        with busy.round:
            try:
                own = _Loan(deepcopy(policy))
            except Exception as error:
                raise RuntimeError(
                    f"policy {policy.name!r} is in use by another call, and copy.deepcopy cannot copy it ({error}): "
                    "give each call that runs at the same time a policy of its own"
                ) from error
    try:
        yield own
    finally:
        with _lock:
            for part in parts:
                _lent.pop(id(part), None)


class BatchPolicies:
    """Lends policies to the texts of one engine. Texts with the same policy learn in one state if the policy wants that."""

    def __init__(self) -> None:
        self._shared: dict[int, _Loan] = {}

    @contextmanager
    def lend(self, policy: Policy) -> Iterator[tuple[Policy, threading.RLock]]:
        """Lend as the function `lend` does, to one text of the batch: the policy, and the lock of its rounds."""
        if not policy.learns_together:
            with lend(policy) as loan:
                yield loan.policy, loan.round
            return
        shared = self._shared.get(id(policy))
        if shared is None:
            held = ExitStack()
            shared = self._shared[id(policy)] = held.enter_context(lend(policy))
            shared.held = held
        shared.texts += 1
        try:
            yield shared.policy.clone_for_sequence(), shared.round
        finally:
            shared.texts -= 1
            if not shared.texts:
                del self._shared[id(policy)]
                shared.held.close()
