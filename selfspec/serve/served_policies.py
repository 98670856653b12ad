"""Which policy a request runs with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from policies import CostModel, Policy, PreVerifier
from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import measured_cost
from selfspec.engine.policy_store import PolicyStore, make_policy
from selfspec.serve.server_settings import ANY_POLICY

REPEATING = "auto:cost=layers"
"""For sampled requests with a seed that name no policy: it decides by counts alone, never by measured time."""
_KEPT = 16


class ServedPolicies:
    """Policies by name for the requests of one server.

    allowed: names that clients may choose; with `ANY_POLICY` among them, every name.
    The server's own policy keeps what it learns from request to request, and so do the last 16 that clients named. A
    sampled request with a seed gets a policy of its own: what others have taught would change what is drafted, and so
    what is drawn.
    """

    def __init__(
        self, generator: SelfSpecGenerator, default: str | None, allowed: Sequence[str] = (ANY_POLICY,)
    ) -> None:
        self._generator, self._default = generator, default
        self._default_name = generator.resolve_policy(default).name
        self._allowed = None if ANY_POLICY in allowed else {REPEATING, self._default_name, *allowed}
        if generator.model.num_layers > 1:  # now, and not while texts decode, for the first request that names "auto"
            measured_cost(generator.model)
        self._named = PolicyStore(most=_KEPT)

    def choose(self, name: str | None, *, repeats: bool) -> Policy:
        """repeats: whether the same request must be drafted the same way every time.

        Raises ValueError for an unknown name, for one that the server does not allow, for one that names a folder, and for
        one that cannot repeat.
        """
        if name is not None and self._allowed is not None and name.strip() not in self._allowed:
            known = ", ".join(sorted(self._allowed))
            raise ValueError(f"policy {name!r} is not allowed on this server, which has {known} (--allow-policy)")
        if name is None and not repeats:
            return self._generator.resolve_policy(self._default)
        if repeats:
            return self._fresh(name)
        assert name is not None
        name = name.strip()
        return self._named.find(name, partial(self._parse, name, measured=True))

    def _fresh(self, name: str | None) -> Policy:
        if name is not None:
            return self._parse(name, measured=False)
        try:
            return self._parse(self._default_name, measured=False)
        except ValueError:
            layers = self._generator.model.num_layers
            return self._parse(REPEATING if layers > 1 else "ar", measured=False)

    def _parse(self, name: str, *, measured: bool) -> Policy:
        measure = None if measured else _refuse_measuring
        return make_policy(self._generator.bound, name, measure=measure, preverifier=self._beside_the_model)

    def _beside_the_model(self, path: str | None) -> PreVerifier:
        if path is not None:
            raise ValueError("a request may not name a folder of the server")
        return self._generator.load_preverifier(None)


def _refuse_measuring() -> CostModel:
    raise ValueError(
        "it decides by measured time, so a seed would not give the same text again: "
        f"leave out seed or policy, or choose one that counts layers, such as {REPEATING}"
    )
