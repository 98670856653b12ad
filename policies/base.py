"""What a policy is: two protocols. What the engine shows them is in `policies.records`.

A policy decides two things in every round: which layer to exit at (an `ExitPolicy`, asked once, before drafting) and
when to stop drafting (a `StoppingPolicy`, asked at every drafted token). `Policy` puts one of each together. Policies see
records of numbers, never the model, so ten numbers test one.

Why a stopping policy is asked twice per token: with a sampled draft, throwing a token away is only exact if the decision
was fixed before the token was drawn. `stop_before_draw` is therefore asked while the token does not exist yet (a stop
means that it never will), and `stop_after_draw`, which sees the token, can only keep it and stop. No policy can express a
biased stop. (A token t with p(t) = q(t) = 0.4, dropped whenever it is drawn, would come out with probability 0.16.)
"""

from __future__ import annotations

import json
import os
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from policies.building import Setup
from policies.records import Drafter, DraftRow, ObservationSpec, Plan, PolicyCost, RoundContext, RoundRecord, Shadow


class Learner(Protocol):
    """Looks at outcomes. What it learned can be dropped, saved and restored."""

    def begin_text(self) -> None:
        """Begin a text; called at the start of every call, before all else: what was seen is of earlier texts."""
        ...

    def observe_prompt(self, shadow: Shadow) -> None:
        """Observe the last prompt rows; called after prefill if `observes.prompt_rows` asked for them."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """Observe a round; called after every one, also one that drafted nothing at an exit."""
        ...

    def reset(self) -> None:
        """Forget everything that was learned."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what was learned, for JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` of an equal policy gave. Raises ValueError if it does not fit."""
        ...


class _Observer(Learner, Protocol):
    @property
    def observes(self) -> ObservationSpec:
        """What the engine computes for it; asked once per call, after `begin_text`."""
        ...


class ExitPolicy(_Observer, Protocol):
    """Chooses the exit layer, and a cap on the length, once per round."""

    @property
    def exit_layers(self) -> tuple[int, ...] | None:
        """Every exit layer that `plan` may choose, ascending; None if it may choose any. Others need not be learned."""
        ...

    def plan(self, context: RoundContext) -> Plan:
        """Return the decision for the coming round."""
        ...


class StoppingPolicy(_Observer, Protocol):
    """Decides at every drafted token whether to go on."""

    def start_round(self, plan: Plan) -> None:
        """Start a round; called after the plan is made, before the first row."""
        ...

    def stop_before_draw(self, row: DraftRow) -> bool:
        """Say whether to draw no token from this row; what was kept so far then goes to verification."""
        ...

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        """Say whether drafting ends with this token, which is kept."""
        ...

    def threshold(self, drafter: Drafter) -> float | None:
        """Return what a row of this drafter is now compared with, for the trace; None if there is no such number."""
        ...

    def spent(self) -> PolicyCost:
        """Return what its decisions cost in this round, in addition to the rows that it looked at."""
        ...


class StatelessPolicy:
    """Defaults for a policy that learns nothing: inherit it and override what differs."""

    observes = ObservationSpec()
    exit_layers: tuple[int, ...] | None = None  # an exit policy's: it may choose any

    def begin_text(self) -> None:
        pass

    def observe_prompt(self, shadow: Shadow) -> None:
        pass

    def observe(self, record: RoundRecord) -> None:
        pass

    def reset(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to take up; ValueError if there is something."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps nothing, but the saved state holds {sorted(state)}")


class DelegatingPolicy:
    """Defaults for a policy that leaves all learning to another object, `learner`."""

    learner: Learner

    def begin_text(self) -> None:
        self.learner.begin_text()

    def observe_prompt(self, shadow: Shadow) -> None:
        self.learner.observe_prompt(shadow)

    def observe(self, record: RoundRecord) -> None:
        self.learner.observe(record)

    def reset(self) -> None:
        self.learner.reset()

    def state(self) -> dict[str, Any]:
        return self.learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.learner.restore(state)


class NeverStop(StatelessPolicy):
    """Defaults for a stopping policy: drafts to the plan's cap and learns nothing."""

    @classmethod
    def from_args(cls, setup: Setup, **options: Any) -> NeverStop:
        """Build it from the ARGS of its name (`policies.names`). Override it to use the setup."""
        return cls(**options)

    def start_round(self, plan: Plan) -> None:
        pass

    def stop_before_draw(self, row: DraftRow) -> bool:
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        return False

    def threshold(self, drafter: Drafter) -> float | None:
        return None

    def spent(self) -> PolicyCost:
        return PolicyCost()


@dataclass(frozen=True, slots=True)
class Policy:
    """An exit policy and, unless the plan's cap is all there is to it, a stopping policy.

    also: what somebody else wants to see in the records (the explanation of a run, say).
    """

    exit: ExitPolicy
    stopping: StoppingPolicy | None = None
    name: str = field(default="custom")
    also: ObservationSpec = field(default=ObservationSpec())

    @property
    def observes(self) -> ObservationSpec:
        own = self.exit.observes | self.stopping.observes if self.stopping is not None else self.exit.observes
        return own | self.also

    @property
    def learns(self) -> bool:
        """True if anything that it learns lasts from one text to the next."""
        return bool(self.exit.state()) or (self.stopping is not None and bool(self.stopping.state()))

    @property
    def learns_together(self) -> bool:
        """True if texts that are decoded together learn in one state (`clone_for_sequence`)."""
        return bool(getattr(self.exit, "learns_together", False))

    def clone_for_sequence(self) -> Policy:
        """Make one more text's policy in the batch: the same exit policy, a stopping policy with a round of its own."""
        make = getattr(self.exit, "default_stopping", None)
        own = None if make is None else make()
        return replace(self, stopping=own if type(own) is type(self.stopping) else deepcopy(self.stopping))

    @property
    def reason(self) -> str | None:
        """Say in a line what it does at present, and why; None if it has nothing to say."""
        say = getattr(self.exit, "reason", None)
        return None if say is None else str(say())

    def expect_batch_size(self, texts: int) -> None:
        """Tell an exit policy that wants to know how many texts will share the passes, the new one among them."""
        expect = getattr(self.exit, "expect_batch_size", None)
        if expect is not None:
            expect(texts)

    def begin_text(self) -> None:
        self.exit.begin_text()
        if self.stopping is not None:
            self.stopping.begin_text()

    def observe_prompt(self, shadow: Shadow) -> None:
        self.exit.observe_prompt(shadow)
        if self.stopping is not None:
            self.stopping.observe_prompt(shadow)

    def observe(self, record: RoundRecord) -> None:
        self.exit.observe(record)
        if self.stopping is not None:
            self.stopping.observe(record)

    def reset(self) -> None:
        self.exit.reset()
        if self.stopping is not None:
            self.stopping.reset()

    def state(self) -> dict[str, Any]:
        """Return what both have learned, as JSON can hold it."""
        return {"exit": self.exit.state(), "stopping": None if self.stopping is None else self.stopping.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` of an equal policy gave. ValueError, and nothing changed, if it does not fit."""
        before = self.exit.state()
        self.exit.restore(state["exit"])
        try:
            if self.stopping is not None:
                self.stopping.restore(state["stopping"])
        except ValueError:
            self.exit.restore(before)
            raise

    def save(self, path: str | Path) -> None:
        """Write what both have learned to a JSON file, which is replaced whole or not at all."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.writing")
        try:
            with temporary.open("w", encoding="utf-8") as stream:
                stream.write(json.dumps({"policy": self.name, **self.state()}))
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def load(self, path: str | Path) -> None:
        """Take up what a policy of the same name saved. ValueError, and nothing changed, for another one's file."""
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(saved, dict) or saved.get("policy") != self.name:
            found = saved.get("policy") if isinstance(saved, dict) else None
            raise ValueError(
                f"{path} holds the state of policy {found!r}, this one is {self.name!r}: load it into that policy, or start "
                "without it"
            )
        self.restore(saved)
