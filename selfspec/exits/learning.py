"""Exit adapters that go on learning from the texts that a model writes in use.

Verification has computed everything that a fit needs: the states after an exit and after the last layer, and the token that
followed. `ExitLearner` takes optimiser steps on such rows when its caller has time. Now and then it compares three adapters
of each exit on texts that nobody learned from: those that drafts are made with, those that it has learned, and those that it
began with. Others are used only where they are right clearly more often. The text never changes, since only drafts see
adapters.

Source: DVI (arXiv 2510.05421), as distillation without its reward; judging on held-out texts is ours.
"""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np
import torch
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.exits.adapter import ExitAdapter, ExitAdapters
from layerskip_models.exits.folder import CONFIG_FILE, WEIGHTS_FILE, save_adapters
from layerskip_models.kernels.threads import OneTeam, on_threads
from selfspec.engine.online_exits import ExitRows, OnlineExits
from selfspec.exits.frozen_head import FrozenHead

FIGURES_FILE = "learning.json"
_WRITING = ".writing"
_AVERAGING = 0.05  # weight of the latest step in the mean that is compared: about the last 20 steps count
_JUDGED_TOGETHER = 64  # rows of a comparison between two looks at whether to go on


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnSettings:
    """How exits learn. ValueError for what cannot be.

    num_bytes: memory for rows. rows_per_text: most rows of one text that are kept. batch_rows: rows of an optimiser step.
    other_tokens: a step looks at the tokens that occur in the rows that are kept, and at so many others that it draws; 0 for
    the whole vocabulary, which takes many times as long where it is large. Comparisons look at all tokens.
    passes: steps are taken until each row was used so often, on average. judge_every: steps between two comparisons.
    least_held_out: rows that a comparison needs; most_held_out: rows that it looks at, drawn if there are more.
    sureness: how many standard deviations better others must be, by the rows where only one of the two is right.
    """

    num_bytes: int = 64 << 20
    rows_per_text: int = 256
    batch_rows: int = 256
    other_tokens: int = 2048
    passes: float = 4.0
    learning_rate: float = 2e-3
    kl_weight: float = 1.0
    ce_weight: float = 0.1
    max_grad_norm: float = 1.0
    judge_every: int = 16
    least_held_out: int = 256
    most_held_out: int = 1024
    sureness: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_bytes", "rows_per_text", "batch_rows", "judge_every", "least_held_out", "most_held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("passes", "learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.kl_weight < 0 or self.ce_weight < 0 or self.kl_weight + self.ce_weight <= 0:
            raise ValueError("kl_weight and ce_weight must not be negative, and one of them must be above 0")
        for name in ("sureness", "other_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAgreement:
    """An exit on the held-out rows of the last comparison: the share where its likeliest token is the one that followed.

    start: with the adapter that learning began with. now: with the one that drafts are made with.
    """

    rows: int
    start: float
    now: float


@dataclass(slots=True, kw_only=True)
class LearningReport:
    """What learning has done so far.

    rows, held_out: rows that were kept to learn from and to judge with, forgotten ones included. steps: of the optimiser.
    judged: comparisons. replaced: how often an exit's adapter was replaced by a learned one; returned: by the one that
    learning began with. agreement: by exit layer.
    """

    rows: int = 0
    held_out: int = 0
    steps: int = 0
    judged: int = 0
    replaced: int = 0
    returned: int = 0
    agreement: Mapping[int, HeldOutAgreement] = field(default_factory=dict)


class ExitLearner:
    """Learns when `learn` is called, from the rows in `online`; one call at a time. Made by `SelfSpecGenerator.learn_exits`.

    start: the adapters that learning began with. current: those that drafts are made with, which differ from `start` if an
    earlier run has learned; they are changed in place. folder: an existing one, which gets every replacement.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        online: OnlineExits,
        *,
        start: ExitAdapters,
        current: ExitAdapters,
        folder: Path,
        settings: LearnSettings,
    ) -> None:
        self.online, self.settings, self.folder = online, settings, folder
        self._model = model
        self._head = FrozenHead(model)
        # As `train-exit` keeps them: a learned adapter is as large as the one before.
        self._stored = model.weights_dtype if model.weights_dtype.itemsize == 2 else None
        self._start, self._current = start.to(model.device), current.to(model.device)
        self._learned = copy.deepcopy(self._current).train()
        self._averaged = copy.deepcopy(self._current)  # what is compared: with a constant rate, single steps are noisy
        self._optimizer = torch.optim.AdamW(
            self._learned.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self._draw = np.random.default_rng(settings.seed)
        self._busy = threading.Lock()
        self._report = LearningReport()

    @property
    def exit_layers(self) -> tuple[int, ...]:
        return self._current.config.exit_layers

    @property
    def current(self) -> ExitAdapters:
        """The adapters that drafts are made with, in float32. Not to be changed."""
        return self._current

    @property
    def report(self) -> LearningReport:
        """A copy of what has been done so far."""
        self._report.rows, self._report.held_out = self.online.learned.seen, self.online.held_out.seen
        return copy.copy(self._report)

    @property
    def has_work(self) -> bool:
        """Whether there are rows that were not yet used as often as the settings say."""
        seen, settings = self.online.learned.seen, self.settings
        return seen >= settings.batch_rows and self._report.steps < settings.passes * seen / settings.batch_rows

    def learn(self, *, seconds: float | None = None, go_on: Callable[[], bool] = lambda: True) -> LearningReport:
        """Learn until no work is left, or for about this long, on one thread.

        go_on: called several times a second, and may wait; once it is false, learning stops and the step at hand is dropped.
        Raises OSError if better adapters cannot be written; they are used all the same.
        """
        until = None if seconds is None else monotonic() + seconds
        with self._busy, OneTeam(), on_threads(1):
            while self.has_work and (until is None or monotonic() < until):
                if not self._step(go_on):
                    break
                if self._report.steps % self.settings.judge_every == 0 and not self._judge(go_on):
                    break
            return self.report

    def _step(self, go_on: Callable[[], bool]) -> bool:
        """One optimiser step. Returns whether it was done."""
        settings = self.settings
        rows = _finite(self.online.learned.drawn(settings.batch_rows, self._draw))
        head, following = self._head_for(rows.tokens)
        self._optimizer.zero_grad(set_to_none=True)
        for chunk in head.chunks(len(rows)):
            if not go_on():
                return False
            last = rows.states[-1, chunk]
            with torch.no_grad():
                target = head.target(last)
            labels = following[chunk]
            for depth, layer in enumerate(self.exit_layers):
                output = self._learned.at(layer)(rows.states[depth, chunk].float())
                gradient = torch.empty_like(output)
                head.loss(
                    output.detach(), target, labels,
                    ce_weight=settings.ce_weight, kl_weight=settings.kl_weight, gradient=gradient,
                )  # fmt: skip
                output.backward(gradient.div_(len(rows)))
        for layer in self.exit_layers:
            torch.nn.utils.clip_grad_norm_(self._learned.at(layer).parameters(), settings.max_grad_norm)
        self._optimizer.step()
        with torch.no_grad():
            for mean, value in zip(self._averaged.parameters(), self._learned.parameters()):
                mean.lerp_(value, _AVERAGING)
        self._report.steps += 1
        return True

    def _head_for(self, tokens: Tensor) -> tuple[FrozenHead, Tensor]:
        """The head over the tokens that a step looks at, and where in it these tokens are. tokens: int64 [n], of some rows.

        Drafts are nearly always among the tokens that texts of the same kind have had. The others keep an exit from moving
        its probability to where no step looks.
        """
        head, others = self._head, self.settings.other_tokens
        if not others:
            return head, tokens.to(head.weight.device)
        drawn = self._draw.choice(head.vocab_size, min(others, head.vocab_size), replace=False)
        looked_at = np.unique(np.concatenate([drawn, self.online.learned.tokens(), tokens.numpy()]))
        places = torch.from_numpy(np.searchsorted(looked_at, tokens.numpy()))
        return head.of_tokens(torch.from_numpy(looked_at).to(head.weight.device)), places.to(head.weight.device)

    def _judge(self, go_on: Callable[[], bool]) -> bool:
        """Compare on the held-out rows, and use what is better. Returns False if it was broken off."""
        number = len(self.online.held_out)
        if number < self.settings.least_held_out:
            return True
        candidates = {layer: self._rounded(self._averaged.at(layer)) for layer in self.exit_layers}
        right: dict[int, list[Tensor]] = {layer: [] for layer in self.exit_layers}  # [3, n] a part
        chosen = self._draw.permutation(number)[: self.settings.most_held_out]
        for first in range(0, len(chosen), _JUDGED_TOGETHER):
            if not go_on():
                return False
            rows = self.online.held_out.at(chosen[first : first + _JUDGED_TOGETHER])
            for depth, layer in enumerate(self.exit_layers):
                compared = self._start.at(layer), self._current.at(layer), candidates[layer]
                right[layer].append(self._right(compared, rows.states[depth].float(), rows.tokens))
        agreement, taken = {}, {}
        for layer, parts in right.items():
            of_start, of_current, of_learned = torch.cat(parts, dim=1)
            now, sureness = of_current, self.settings.sureness
            no_worse = int(of_learned.sum()) >= int(of_start.sum())
            if no_worse and clearly_better(of_learned, of_current, sureness):
                taken[layer], now = candidates[layer], of_learned
                self._report.replaced += 1
            elif clearly_better(of_start, of_current, sureness):
                taken[layer], now = self._start.at(layer), of_start
                self._report.returned += 1
                self._learn_anew(layer, self._start.at(layer))
            elif clearly_better(of_current, of_learned, sureness):
                self._learn_anew(layer, self._current.at(layer))
            agreement[layer] = HeldOutAgreement(
                rows=len(chosen), start=float(of_start.float().mean()), now=float(now.float().mean())
            )
        self._report.judged += 1
        self._report.agreement = agreement
        if taken:
            self._use(taken)
            self.save()
        return True

    @torch.no_grad()
    def _right(self, adapters: tuple[ExitAdapter, ...], states: Tensor, tokens: Tensor) -> Tensor:
        """bool [adapters, n]: where what an exit would draft is the token that followed. NaN drafts nothing."""
        found = []
        for adapter in adapters:
            choices = self._model.draft_choices(adapter(states).to(self._model.dtype))
            found.append((choices.tokens == tokens.to(states.device)) & ~choices.logits.isnan())
        return torch.stack(found).cpu()

    def _rounded(self, adapter: ExitAdapter) -> ExitAdapter:
        """A copy with weights as they are stored and drafted with."""
        found = copy.deepcopy(adapter).eval()
        if self._stored is not None:
            for parameter in found.parameters():
                parameter.data = parameter.data.to(self._stored).float()
        return found

    def _use(self, taken: Mapping[int, ExitAdapter]) -> None:
        """Draft with these from the next round on."""
        for layer, adapter in taken.items():
            self._current.at(layer).load_state_dict(adapter.state_dict())
        self.online.offer({layer: self.online.adapter(layer).laid_out(one) for layer, one in taken.items()})

    def _learn_anew(self, layer: int, adapter: ExitAdapter) -> None:
        """Go on learning from here: what was learned since has not helped."""
        for one in (self._learned, self._averaged):
            one.at(layer).load_state_dict(adapter.state_dict())
        for parameter in self._learned.at(layer).parameters():
            self._optimizer.state.pop(parameter, None)

    def save(self) -> None:
        """Write the adapters that drafts are made with, and what learning has done, into the folder. Raises OSError.

        Each file is written whole or not at all; the folder is one that `exits=` takes.
        """
        writing = self.folder / _WRITING
        writing.mkdir(exist_ok=True)
        save_adapters(self._current, writing, self._stored)
        (writing / FIGURES_FILE).write_text(json.dumps(asdict(self.report), indent=1) + "\n", encoding="utf-8")
        for name in (CONFIG_FILE, WEIGHTS_FILE, FIGURES_FILE):
            (writing / name).replace(self.folder / name)
        writing.rmdir()


def clearly_better(one: Tensor, other: Tensor, sureness: float) -> bool:
    """Whether one is right more often than the other, by more than chance. Both bool [n], on the same rows.

    Only rows where exactly one of them is right count (McNemar's test): if both were equally good, the difference would have
    a standard deviation of the root of their number.
    """
    wins, losses = int((one & ~other).sum()), int((other & ~one).sum())
    return wins > losses and wins - losses > sureness * math.sqrt(wins + losses)


def _finite(rows: ExitRows) -> ExitRows:
    """The rows without NaN and infinity, which a text that broke off may have left."""
    sound = rows.states.isfinite().all(dim=-1).all(dim=0)
    return rows if bool(sound.all()) else ExitRows(rows.states[:, sound], rows.tokens[sound.cpu()])
