"""Fitting exit adapters to hidden states of a frozen model: the loss, its gradient, and how good the result is.

Nothing here reads or writes files. `training` takes the steps in a resumable run of hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.steering import FARTHEST
from layerskip_models.training.accepted_length import accepted_length_weights
from layerskip_models.training.documents import block_order
from layerskip_models.training.gradients import sum_gradients
from selfspec.exits.frozen_head import FrozenHead
from selfspec.exits.hidden_state_dataset import ExitSequence
from selfspec.exits.settings import FitSettings
from selfspec.exits.steered_rows import exit_outputs

WINDOW = 8
"""Length of the drafts whose accepted tokens are counted."""
_SCALE_SEQUENCES = 32  # from whose rows an exit's scale is taken
_TERMS = 4  # of a step's sums per exit: ce, kl, agreements, rows


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


class ExitFit:
    """A fit, step by step. Sets the adapters' scales to begin with.

    sequences: with scored rows each. depths: of their states, ascending; the exits are among them, and the last layer is
    the last. accelerator: each process takes its part of every batch. Raises ValueError if there is nothing to fit to.
    """

    def __init__(
        self,
        adapters: ExitAdapters,
        sequences: Sequence[ExitSequence],
        depths: Sequence[int],
        head: FrozenHead,
        settings: FitSettings,
        accelerator: Accelerator,
    ) -> None:
        if not sequences:
            raise ValueError("there is no text to fit exit adapters to: give more data")
        self.adapters, self.sequences, self.depths, self.head = adapters, sequences, depths, head
        self.settings, self.accelerator = settings, accelerator
        self.optimizer = torch.optim.AdamW(adapters.parameters(), betas=(0.9, 0.99), weight_decay=settings.weight_decay)
        _set_scales(adapters, sequences, depths)

    def _outputs(self, sequence: ExitSequence, rows: Tensor, draw: np.random.Generator) -> list[Tensor]:
        """Compute what replaces each exit's states; steered adapters are steered by a row at a random distance."""
        distance = rows
        if self.adapters.steering is not None:
            distance = torch.from_numpy(draw.integers(1, FARTHEST + 1, len(rows))).to(rows.device)
        return exit_outputs(self.adapters, sequence, self.depths, rows, distance)

    def gradient(self, step: int) -> StepFigures:
        """Compute the gradient of one batch, a mean over its scored rows, summed over the processes."""
        settings, accelerator, device = self.settings, self.accelerator, self.head.weight.device
        batch = min(settings.batch, len(self.sequences))
        chosen = block_order(step, batch, len(self.sequences), settings.seed)
        layers = list(self.adapters.exit_layers)
        sums = torch.zeros(len(layers), _TERMS, device=device)
        for place in range(accelerator.process_index, batch, accelerator.num_processes):
            draw = np.random.default_rng([settings.seed, step, place])
            sequence = self.sequences[chosen[place]].to(device)
            rows = sequence.scored_rows()
            if 0 < settings.positions < len(rows):
                first = int(draw.integers(0, len(rows) - settings.positions + 1))
                rows = rows[first : first + settings.positions]
            with accelerator.autocast():
                outputs = self._outputs(sequence, rows, draw)
            torch.autograd.backward(outputs, self._losses(sequence, rows, outputs, sums))
        total = sum_gradients(accelerator, self.adapters, sums.flatten()).view_as(sums)
        for parameter in self.adapters.parameters():
            if parameter.grad is not None:
                parameter.grad /= total[:, 3].sum()  # a mean over rows and exits
        means = (total[:, :3] / total[:, 3:]).T.tolist()
        ce, kl, agreement = (dict(zip(layers, values)) for values in means)
        return StepFigures(ce=ce, kl=kl, agreement=agreement)

    def _losses(self, sequence: ExitSequence, rows: Tensor, outputs: Sequence[Tensor], sums: Tensor) -> list[Tensor]:
        """Gradients of the outputs of every exit, [n, hidden] each; adds to `sums` [exits, _TERMS]."""
        settings, head = self.settings, self.head
        outputs = [output.detach() for output in outputs]
        gradients = [torch.empty_like(output, dtype=torch.float32) for output in outputs]
        last = states_at(sequence, self.depths, self.depths[-1], rows)
        own, following = sequence.own[rows], sequence.labels[rows]
        ce = torch.empty(len(outputs), len(last), device=last.device)
        for chunk in head.chunks(len(last)):
            target = head.target(last[chunk])
            # The text's own tokens where the model wrote it; elsewhere what the model would have written.
            labels = torch.where(own[chunk], following[chunk], target.tokens)
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
                count = sums.new_tensor(len(labels))
                sums[index] += torch.stack([loss.ce.sum(), loss.kl.sum(), loss.agrees.sum(), count])
        weigh = partial(accepted_length_weights, arm=settings.arm, alpha=settings.alpha, block=settings.block)
        for gradient, losses in zip(gradients, ce):
            gradient *= in_runs(losses, sequence.runs(rows), weigh).unsqueeze(-1)
        return [gradient.to(output.dtype) for gradient, output in zip(gradients, outputs)]


@torch.no_grad()
def _set_scales(adapters: ExitAdapters, sequences: Sequence[ExitSequence], depths: Sequence[int]) -> None:
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


def states_at(sequence: ExitSequence, depths: Sequence[int], layer: int, rows: Tensor) -> Tensor:
    """[n, hidden], in the states' own dtype."""
    return sequence.states[rows, depths.index(layer)]


def in_runs(values: Tensor, runs: Tensor, weights: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Weights of the rows of one sequence, [n]. values: [n]. runs: int64 [n], numbers of the stretches without gaps.

    weights(values, valid): of rows [1, length], among which those between two stretches are not valid.
    """
    places = torch.arange(len(runs), device=runs.device) + runs  # one place is left free between two stretches
    row = values.new_zeros(int(places[-1]) + 1)
    valid = torch.zeros_like(row, dtype=torch.bool)
    row[places], valid[places] = values, True
    return weights(row.unsqueeze(0), valid.unsqueeze(0))[0, places].to(values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitQuality:
    """How well an exit predicts the model, on given text.

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
    """An exit without its adapter and with it. rows: how many were compared."""

    rows: int
    bare: ExitQuality
    adapted: ExitQuality


@torch.no_grad()
def measure(
    adapters: ExitAdapters, sequences: Sequence[ExitSequence], depths: Sequence[int], head: FrozenHead
) -> dict[int, ExitFigures]:
    """Every exit's figures on these sequences, by exit layer; steered ones by rows at every distance in turn."""
    device = head.weight.device
    tallies = {layer: (_Tally(), _Tally()) for layer in adapters.exit_layers}
    for sequence in (one.to(device) for one in sequences):
        rows = sequence.scored_rows()
        runs = sequence.runs(rows)
        last = states_at(sequence, depths, depths[-1], rows)
        judged: list[tuple[_Tally, Tensor]] = []
        in_turn = torch.arange(len(rows), device=rows.device) % FARTHEST + 1  # a mean over the places in a draft
        outputs = exit_outputs(adapters, sequence, depths, rows, in_turn)
        for (layer, (bare, adapted)), output in zip(tallies.items(), outputs):
            judged += [(bare, states_at(sequence, depths, layer, rows).float()), (adapted, output)]
        results = torch.empty(len(judged), 3, len(last), device=device)
        for chunk in head.chunks(len(last)):
            target = head.target(last[chunk])
            for result, (_, hidden) in zip(results, judged):
                loss = head.loss(hidden[chunk], target, target.tokens)
                result[:, chunk] = torch.stack([loss.agrees.float(), head.overlap(hidden[chunk], target), loss.kl])
        for result, (tally, _) in zip(results, judged):
            tally.add(result, runs)
    return {
        layer: ExitFigures(rows=bare.rows, bare=bare.quality(), adapted=adapted.quality())
        for layer, (bare, adapted) in tallies.items()
    }


class _Tally:
    """Sums over sequences for one `ExitQuality`."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._accepted = self._drafts = 0

    def add(self, result: Tensor, runs: Tensor) -> None:
        """Add a sequence's figures.

        result: [3, rows]; agreement, overlap, KL. Drafts start at every row that has WINDOW rows ahead in its stretch.
        """
        self.rows += len(runs)
        self._sums += result.double().sum(dim=1).cpu()
        agrees = result[0].bool()
        window = min(WINDOW, int(runs.bincount().max()))
        holding = runs[: len(runs) - window + 1] == runs[window - 1 :]
        self._drafts += int(holding.sum())
        for place in range(window):
            holding = holding & agrees[place : place + len(holding)]
            self._accepted += int(holding.sum())

    def quality(self) -> ExitQuality:
        agreement, overlap, kl = (self._sums / max(self.rows, 1)).tolist()
        return ExitQuality(agreement=agreement, overlap=overlap, run=self._accepted / max(self._drafts, 1), kl=kl)
