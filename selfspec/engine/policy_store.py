"""Policies by name: made once, and kept with what they have learned."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

from layerskip_models.fork_safe import fork_safe
from policies import CostModel, MeasuredCost, Policy, PreVerifier, autoregressive, check_exit_layer, parse_policy
from policies.auto.policy import AutoExit
from selfspec.defaults import DEFAULT_POLICY, fixed_setting
from selfspec.engine.calibrate import measured_cost
from selfspec.engine.draft_choice import bits_on_offer, make_for
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
        with self._lock:  # two simultaneous first calls share one calibration and policy
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
        found = self._resolve(bound, policy, exit_layer, num_speculations)
        if found is not policy:  # what a policy of the caller's own observes is asked once a call, by its sequence
            make_for(bound.model, bound.draft_weights, found.name, found.observes.bits)
        return found

    def _resolve(
        self, bound: BoundModel, policy: str | Policy | None, exit_layer: int | None, num_speculations: int | None
    ) -> Policy:
        model = bound.model
        if exit_layer is not None:
            check_exit_layer(exit_layer, model.num_layers)
        if num_speculations == 0 and not isinstance(num_speculations, bool):
            return autoregressive(model.num_layers)
        if exit_layer is None and num_speculations is None:
            policy = self.default if policy is None else policy
            if isinstance(policy, Policy):
                return policy
            name = (DEFAULT_POLICY if model.num_layers > 1 else "ar") if policy is None else policy.strip()
            return self._with_draft_weights(bound, name, (name, model.dtype, model.device))
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
        offered = bits_on_offer(model, bound.draft_weights)
        if (tuple(sorted(model.drafters)), offered) == (chooser.observes.bits, chooser.offered_bits):
            return policy
        with self._lock:
            self._kept.pop(key, None)

        def make() -> Policy:
            made = make_policy(bound, name)
            assert isinstance(made.exit, AutoExit)
            made.exit.adopt(chooser)
            return made

        return self.find(key, make)


def make_policy(
    bound: BoundModel,
    name: str,
    *,
    measure: Callable[[], CostModel] | None = None,
    preverifier: Callable[[str | None], PreVerifier] | None = None,
) -> Policy:
    """Make a new policy for the model.

    measure, preverifier: as for `parse_policy`; by default the model's calibration and its loader of pre-verifiers.
    """
    return parse_policy(
        name,
        num_layers=bound.model.num_layers,
        measure=measure or partial(_measured_cost, bound),
        preverifier=preverifier or bound.preverifiers,
        draft_bits=tuple(sorted(bound.model.drafters)),
        offered_bits=bits_on_offer(bound.model, bound.draft_weights),
    )


def _measured_cost(bound: BoundModel) -> MeasuredCost:
    """Measure the costs of the model, and of its weights in fewer bits."""
    cost = measured_cost(bound.model)
    drafters = sorted(bound.model.drafters.items())
    return replace(cost, rounded=tuple((bits, measured_cost(drafter)) for bits, drafter in drafters))
