"""Fitting exit adapters to hidden states of a frozen model: the loss, the steps, and how good the result is.

Nothing here reads or writes files, so `fit` serves a run of hours (`train_exit`) as well as a look of a few minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.training.accepted_length import accepted_length_weights
from layerskip_models.training.documents import block_order
from layerskip_models.training.whole_copies import sum_over_processes
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.sequences import FARTHEST, ExitSequence, with_gaps

_SCALE_SEQUENCES = 32  # whose rows give an exit's scale
_TERMS = 4  # of a step's sums per exit: ce, kl, agreements, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How adapters are fitted.

    steps: of the optimiser, each over `batch` sequences. ce_weight, kl_weight: of the two losses. arm, alpha, block: weights
    of positions by what they are worth for the accepted length (`accepted_length_weights`). positions: scored rows of a
    sequence that a step uses, a random stretch of them; 0 for all.
    """

    steps: int
    batch: int = 4
    learning_rate: float = 5e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ce_weight: float = 0.1
    kl_weight: float = 1.0
    arm: str = "uniform"
    alpha: float = 0.5
    block: int = 8
    positions: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Means over the scored rows of one step, by exit layer: losses in nats, and the share of rows that agree."""

    ce: dict[int, float]
    kl: dict[int, float]
    agreement: dict[int, float]

    @property
    def mean_kl(self) -> float:
        """Over the exits."""
        return sum(self.kl.values()) / len(self.kl)


AfterStep = Callable[[int, StepFigures], None]
"""after_step(steps done, figures)"""


def fit(
    adapters: ExitAdapters,
    sequences: Sequence[ExitSequence],
    depths: Sequence[int],
    head: FrozenHead,
    settings: FitSettings,
    *,
    seconds: float | None = None,
    accelerator: Accelerator | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    first_step: int = 0,
    after_step: AfterStep = lambda done, figures: None,
) -> int:
    """Train adapters in place. Returns the number of steps done.

    sequences: with scored rows each. depths: of their states, ascending: the exits, the steering layers, the last layer.
    seconds: stop by then if not before, in one process; the learning rate then falls with the time. Without it the result is
    a function of the other arguments, and a run that goes on at `first_step` with the same `optimizer` is the same run.
    accelerator: each process takes its part of every batch. Raises ValueError if there is nothing to fit to.
    """
    if not sequences:
        raise ValueError("there is no text to fit exit adapters to: give more data")
    accelerator = accelerator or Accelerator(cpu=head.weight.device.type == "cpu")
    optimizer = optimizer or make_optimizer(adapters, settings)
    if first_step == 0:
        set_scales(adapters, sequences, depths)
    started = time.monotonic()
    done = first_step
    while done < settings.steps:
        spent = 0.0 if seconds is None else (time.monotonic() - started) / seconds
        if spent >= 1:
            break
        progress = max(done / settings.steps, spent)
        rate = settings.learning_rate * min(1.0, (done + 1) / (settings.warmup_steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * progress))
        figures = _gradient(adapters, sequences, depths, head, settings, done, accelerator)
        torch.nn.utils.clip_grad_norm_(adapters.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        after_step(done, figures)
    return done


def make_optimizer(adapters: ExitAdapters, settings: FitSettings) -> torch.optim.Optimizer:
    """AdamW over the adapters, which is all that a run keeps an optimiser's state of."""
    return torch.optim.AdamW(
        adapters.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay
    )


@torch.no_grad()
def set_scales(adapters: ExitAdapters, sequences: Sequence[ExitSequence], depths: Sequence[int]) -> None:
    """Set each adapter's scale to the power of two next to the root mean square of its exit's states.

    A power of two, so that the scale times weights of 16 bits has 16 bits, and drafts read no more bytes.
    """
    some = np.linspace(0, len(sequences) - 1, min(_SCALE_SEQUENCES, len(sequences))).round().astype(int)
    squares, numbers = torch.zeros(len(depths), dtype=torch.float64), 0
    for index in some.tolist():
        states = sequences[index].states
        squares += states.double().square().sum(dim=(0, 2)).cpu()
        numbers += states.shape[0] * states.shape[2]
    for layer in adapters.exit_layers:
        root = math.sqrt(float(squares[depths.index(layer)]) / numbers)
        adapters.at(layer).scale.fill_(2.0 ** round(math.log2(max(root, 1e-30))))


class ExitRows:
    """Rows of a sequence, and what its exits say of them. rows: int64 [n], ascending. adapters: None for bare exits only."""

    def __init__(
        self, adapters: ExitAdapters | None, sequence: ExitSequence, depths: Sequence[int], rows: Tensor
    ) -> None:
        self._adapters, self._sequence, self._depths, self.rows = adapters, sequence, depths, rows
        self.labels, self.own = sequence.labels[rows], sequence.own[rows]

    def bare(self, layer: int) -> Tensor:
        """The exit's states, [n, hidden]; of the last layer, what the model says."""
        return self._sequence.states[self.rows, self._depths.index(layer)]

    def steering(self, distance: Tensor) -> Tensor | None:
        """Of the rows `distance` (int64 [n]) before these, [n, steering_size]: zero states where there is no such row."""
        if self._adapters is None or self._adapters.steering is None:
            return None
        steering = self._adapters.steering
        found = self._sequence.behind(self.rows, distance)
        columns = [self._depths.index(layer) for layer in self._adapters.config.steering_layers]
        states = self._sequence.states[found.clamp_min(0)][:, columns].float()
        return steering(states * (found >= 0).view(-1, 1, 1))

    def adapted(self, layer: int, steering: Tensor | None) -> Tensor:
        """What stands in the place of the exit's states, float32 [n, hidden]."""
        assert self._adapters is not None
        adapter = self._adapters.at(layer)
        if self._adapters.config.form != "layer":
            return adapter(self.bare(layer).float(), steering=steering)
        sequence = self._sequence
        hidden = sequence.states[:, self._depths.index(layer)].float().unsqueeze(0)
        return adapter(hidden, positions=sequence.positions.unsqueeze(0), mask=sequence.mask())[0, self.rows]


def _gradient(
    adapters: ExitAdapters,
    sequences: Sequence[ExitSequence],
    depths: Sequence[int],
    head: FrozenHead,
    settings: FitSettings,
    step: int,
    accelerator: Accelerator,
) -> StepFigures:
    """The gradient of one batch, a mean over its scored rows, summed over the processes."""
    device = head.weight.device
    batch = min(settings.batch, len(sequences))
    chosen = block_order(step, batch, len(sequences), settings.seed)
    layers = list(adapters.exit_layers)
    sums = torch.zeros(len(layers), _TERMS, device=device)
    for place in range(accelerator.process_index, batch, accelerator.num_processes):
        draw = np.random.default_rng([settings.seed, step, place])
        sequence = sequences[chosen[place]].to(device)
        rows = _stretch(sequence.scored.nonzero().flatten(), settings.positions, draw)
        distance = torch.from_numpy(draw.integers(1, FARTHEST + 1, len(rows))).to(device)
        with accelerator.autocast():
            chosen_rows = ExitRows(adapters, sequence, depths, rows)
            steering = chosen_rows.steering(distance)
            outputs = [chosen_rows.adapted(layer, steering) for layer in layers]
        gradients = _losses(chosen_rows, outputs, depths[-1], sequence.runs(rows), head, settings, sums)
        torch.autograd.backward(outputs, gradients)
    total = sum_over_processes(accelerator, adapters.parameters(), sums.flatten()).view_as(sums)
    for parameter in adapters.parameters():
        if parameter.grad is not None:
            parameter.grad /= total[:, 3].sum()  # a mean over rows and exits
    means = (total[:, :3] / total[:, 3:]).tolist()
    return StepFigures(
        ce={layer: mean[0] for layer, mean in zip(layers, means)},
        kl={layer: mean[1] for layer, mean in zip(layers, means)},
        agreement={layer: mean[2] for layer, mean in zip(layers, means)},
    )


def _losses(
    rows: ExitRows,
    outputs: Sequence[Tensor],
    last_layer: int,
    runs: Tensor,
    head: FrozenHead,
    settings: FitSettings,
    sums: Tensor,
) -> list[Tensor]:
    """Gradients of the outputs of every exit, [n, hidden] each; adds to `sums` [exits, _TERMS]."""
    outputs = [output.detach() for output in outputs]
    gradients = [torch.empty_like(output, dtype=torch.float32) for output in outputs]
    last = rows.bare(last_layer)
    ce = torch.empty(len(outputs), len(last), device=last.device)
    for chunk in head.chunks(len(last)):
        target = head.target(last[chunk])
        # The text's own tokens where the model wrote it; elsewhere what the model would have written.
        labels = torch.where(rows.own[chunk], rows.labels[chunk], target.tokens)
        for index, output in enumerate(outputs):
            loss = head.loss(
                output[chunk],
                target,
                labels,
                ce_weight=settings.ce_weight,
                kl_weight=settings.kl_weight,
                gradient=gradients[index][chunk],
            )
            ce[index, chunk] = loss.ce
            sums[index] += torch.stack([loss.ce.sum(), loss.kl.sum(), loss.agrees.sum(), sums.new_tensor(len(labels))])
    for gradient, losses in zip(gradients, ce):
        gradient *= _position_weights(losses, runs, settings).unsqueeze(-1)
    return [gradient.to(output.dtype) for gradient, output in zip(gradients, outputs)]


def _position_weights(losses: Tensor, runs: Tensor, settings: FitSettings) -> Tensor:
    """D-PACE's weights of the rows of one sequence, [n], of mean 1. A draft ends where a stretch does."""
    places, row = with_gaps(losses, runs)
    valid = torch.zeros_like(row, dtype=torch.bool)
    valid[places] = True
    weights = accepted_length_weights(
        row.unsqueeze(0), valid.unsqueeze(0), arm=settings.arm, alpha=settings.alpha, block=settings.block
    )
    return weights[0, places]


def _stretch(rows: Tensor, number: int, draw: np.random.Generator) -> Tensor:
    if number == 0 or number >= len(rows):
        return rows
    first = int(draw.integers(0, len(rows) - number + 1))
    return rows[first : first + number]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitQuality:
    """How well an exit foretells the model, on given text.

    agreement: share of rows whose likeliest token is the model's. overlap: the chance, at temperature 1, that a drawn token
    is accepted. run: mean number of tokens accepted, greedily, of a draft of WINDOW; of shorter ones where the text has no
    stretches as long. kl: KL(model || exit), in nats.
    """

    agreement: float
    overlap: float
    run: float
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFigures:
    """An exit without its adapter and with it. rows: how many were looked at."""

    rows: int
    bare: ExitQuality
    adapted: ExitQuality


WINDOW = FARTHEST


@torch.no_grad()
def measure(
    adapters: ExitAdapters, sequences: Sequence[ExitSequence], depths: Sequence[int], head: FrozenHead
) -> dict[int, ExitFigures]:
    """Every exit's figures on these sequences, by exit layer.

    Steered adapters are steered as in drafting: the j-th token of a draft by the row j behind it. Their agreement, overlap
    and KL are means over the first WINDOW tokens of a draft.
    """
    device = head.weight.device
    layers = list(adapters.exit_layers)
    places = range(WINDOW) if adapters.steering is not None else range(1)
    tallies = {(layer, kind): _Tally() for layer in layers for kind in ("bare", "adapted")}
    for sequence in (one.to(device) for one in sequences):
        rows = ExitRows(adapters, sequence, depths, sequence.scored.nonzero().flatten())
        runs = sequence.runs(rows.rows)
        last = rows.bare(depths[-1])
        versions: list[tuple[tuple[int, str], Tensor]] = []
        for layer in layers:
            versions.append(((layer, "bare"), rows.bare(layer).float()))
        for place in places:
            steering = rows.steering(torch.full_like(rows.rows, place + 1))
            versions += [((layer, "adapted"), rows.adapted(layer, steering)) for layer in layers]
        agrees: dict[tuple[int, str], list[Tensor]] = {key: [] for key in tallies}
        results = torch.empty(len(versions), 3, len(last), device=device)
        for chunk in head.chunks(len(last)):
            target = head.target(last[chunk])
            for index, (_, hidden) in enumerate(versions):
                loss = head.loss(hidden[chunk], target, target.tokens)
                results[index, 0, chunk] = loss.agrees.float()
                results[index, 1, chunk] = head.overlap(hidden[chunk], target)
                results[index, 2, chunk] = loss.kl
        for (key, _), result in zip(versions, results):
            agrees[key].append(result[0].bool())
            tallies[key].add(result)
        for key, by_place in agrees.items():
            tallies[key].add_runs(by_place, runs)
    return {
        layer: ExitFigures(
            rows=tallies[layer, "bare"].rows,
            bare=tallies[layer, "bare"].quality(),
            adapted=tallies[layer, "adapted"].quality(),
        )
        for layer in layers
    }


class _Tally:
    """Sums over sequences for one `ExitQuality`."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._accepted = self._drafts = 0.0

    def add(self, result: Tensor) -> None:
        """result: [3, rows]; agreement, overlap, KL."""
        self.rows += result.shape[1]
        self._sums += result.double().sum(dim=1).cpu()

    def add_runs(self, by_place: Sequence[Tensor], runs: Tensor) -> None:
        """Drafts from every row that has WINDOW rows ahead in its stretch. by_place: agreements, bool [rows], of a draft's
        first, second .. token; of all tokens if there is one only."""
        window = min(WINDOW, int(runs.bincount().max()))
        holding = torch.ones_like(by_place[0])
        starts = len(runs) - window + 1
        complete = runs[: max(starts, 0)] == runs[window - 1 :]
        holding = holding[: len(complete)] & complete
        self._drafts += int(complete.sum())
        for place in range(window):
            holding = holding & by_place[min(place, len(by_place) - 1)][place : place + len(complete)]
            self._accepted += int(holding.sum())

    def quality(self) -> ExitQuality:
        agreement, overlap, kl = (self._sums / max(self.rows, 1)).tolist()
        return ExitQuality(agreement=agreement, overlap=overlap, run=self._accepted / max(self._drafts, 1), kl=kl)
