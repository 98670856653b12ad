"""The loss of exit adapters against the frozen model that they are for, and figures of how good they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerskip_models.exits.adapter import FARTHEST, ExitAdapters
from layerskip_models.training.exit_losses import accepted_length_weights
from selfspec.exits.frozen_model import ExitRows, FrozenHead

WINDOW = 8
"""Length of the drafts whose accepted tokens are counted."""


class ExitAdapterLoss(nn.Module):
    """kl_weight * KL(model || exit) + ce_weight * cross-entropy, a mean over exits and scored rows.

    depths: of the rows' states, ascending; the exits are among them, and the last layer is the last.
    d_pace: instead the cross-entropy alone, each row's times its weight for the accepted length of the drafts that hold it
        (D-PACE, Wu et al. 2026, equations 8 and 9), and divided by the number of drafts: one starts at every row.
    """

    def __init__(
        self,
        adapters: ExitAdapters,
        head: FrozenHead,
        depths: Sequence[int],
        *,
        kl_weight: float,
        ce_weight: float,
        d_pace: bool = False,
    ) -> None:
        super().__init__()
        self.adapters, self.head, self.depths, self.d_pace = adapters, head, depths, d_pace
        self.kl_weight, self.ce_weight = (0.0, 1.0) if d_pace else (kl_weight, ce_weight)

    def forward(self, rows: ExitRows, distance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss and [3 * exits] means: cross-entropies and KLs in nats, and the shares of rows that agree.

        distance: see `outputs`. Logits exist for a few rows at a time. The head is frozen, so each chunk is taken back to the
        exits' outputs at once, and what is returned has that gradient: nothing is computed twice.
        """
        outputs, count = self.outputs(rows, distance), len(rows.scored)
        weights = self._accepted_length_weights(rows, outputs.detach()) if self.d_pace else outputs.new_ones(1, count)
        loss, means, gradients = outputs.new_zeros(()), outputs.new_zeros(3, len(self.layers)), []
        for chunk in self.chunks(rows):
            hidden = outputs[:, chunk].detach().requires_grad_()
            with torch.no_grad():
                p = self.head.logits(rows.states[rows.scored[chunk], -1]).softmax(-1)  # [rows, vocab]
                tokens, negative_entropy = p.argmax(-1), torch.special.xlogy(p, p).sum(-1)
                labels = _labels(rows, chunk, tokens)
                by_label = torch.full_like(p[:, :1], self.ce_weight)
                target = (self.kl_weight * p).scatter_add_(-1, labels.unsqueeze(-1), by_label)
            logq = self.head.logits(hidden).log_softmax(-1)  # [exits, rows, vocab]
            part = -(weights[:, chunk] * torch.linalg.vecdot(target, logq)).sum() / (count * len(self.layers))
            part.backward()
            assert hidden.grad is not None
            gradients.append(hidden.grad)
            with torch.no_grad():
                ce = _cross_entropies(logq, labels)
                kl = negative_entropy - torch.linalg.vecdot(p, logq)
                means += torch.stack([ce, kl, (logq.argmax(-1) == tokens).float()]).sum(-1) / count
                loss += part + self.kl_weight * negative_entropy.sum() / count
        surrogate = (outputs * torch.cat(gradients, dim=1)).sum()
        return loss + (surrogate - surrogate.detach()), means.flatten()

    @torch.no_grad()
    def _accepted_length_weights(self, rows: ExitRows, outputs: Tensor) -> Tensor:
        """Find the weights of the scored rows, [exits, n]. Rows that are not scored end a draft."""
        losses = outputs.new_zeros(len(self.layers), len(rows.states))
        for chunk in self.chunks(rows):
            places = rows.scored[chunk]
            labels = _labels(rows, chunk, self.head.logits(rows.states[places, -1]).argmax(-1))
            logq = self.head.logits(outputs[:, chunk]).log_softmax(-1)
            losses[:, places] = _cross_entropies(logq, labels)
        valid = torch.zeros_like(losses, dtype=torch.bool)
        valid[:, rows.scored] = True
        return accepted_length_weights(losses, valid, arm="full", mean_one=False)[:, rows.scored]

    def outputs(self, rows: ExitRows, distance: Tensor | None = None) -> Tensor:
        """Compute what replaces each exit's states at the scored rows, float32 [exits, n, hidden].

        distance: int64 [n], how far before each row the row is that steers it, if the adapters are steered; where there is no
        such row, nothing steers.
        """
        steering = None
        if self.adapters.steering is not None and distance is not None:
            before, there = rows.before(distance)
            columns = [self.depths.index(layer) for layer in self.adapters.steering.layers]
            steering = self.adapters.steering(rows.states[before][:, columns].float() * there.view(-1, 1, 1))
        return torch.stack([self.adapters.at(layer)(one, steering) for layer, one in zip(self.layers, self.bare(rows))])

    def bare(self, rows: ExitRows) -> Tensor:
        """Return the exits' own states at the scored rows, float32 [exits, n, hidden]."""
        return torch.stack([rows.states[rows.scored, self.depths.index(layer)].float() for layer in self.layers])

    @property
    def layers(self) -> Sequence[int]:
        return self.adapters.exit_layers

    def chunks(self, rows: ExitRows) -> list[slice]:
        """Slices of the scored rows whose logits may exist at once."""
        size = max(self.head.chunk_rows // len(self.layers), 1)
        return [slice(first, first + size) for first in range(0, len(rows.scored), size)]


def _cross_entropies(logq: Tensor, labels: Tensor) -> Tensor:
    """Take each exit's losses, [exits, n], from its log probabilities, [exits, n, vocab], of the labels, [n]."""
    return -logq.gather(-1, labels.expand(len(logq), -1).unsqueeze(-1)).squeeze(-1)


def _labels(rows: ExitRows, chunk: slice, likeliest: Tensor) -> Tensor:
    """Return the text's own tokens where the model wrote it; elsewhere what it would have written."""
    return torch.where(rows.own[chunk], rows.labels[chunk], likeliest)


@torch.no_grad()
def set_scales(loss: ExitAdapterLoss, batches: Iterable[ExitRows]) -> None:
    """Set each adapter's scale to the power of two next to the root mean square of its exit's states.

    A power of two, so that the scale times weights of 16 bits has 16 bits, and drafts read no more bytes.
    """
    squares = torch.stack([loss.bare(rows).square().mean(dim=(1, 2)) for rows in batches]).mean(0)
    for layer, square in zip(loss.layers, squares.tolist()):
        loss.adapters.at(layer).scale.fill_(2.0 ** round(math.log2(max(math.sqrt(square), 1e-30))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitQuality:
    """How well an exit predicts the model, on given text.

    agreement: share of rows whose likeliest token is the model's. overlap: the chance, at temperature 1, that a drawn token
    is accepted. run: mean number of tokens accepted, greedily, of a draft of WINDOW; of shorter ones where the text has no
    stretches as long. kl: KL(model || exit), in nats.
    """

    agreement: float
    overlap: float
    kl: float
    run: float


@torch.no_grad()
def measure(loss: ExitAdapterLoss, batches: Iterable[ExitRows]) -> dict[int, tuple[ExitQuality, ExitQuality]]:
    """Every exit's quality on these rows, without its adapter and with it; steered ones by rows at every distance in turn."""
    head, count = loss.head, 2 * len(loss.layers)
    sums, num_rows = torch.zeros(count, 3, dtype=torch.float64), 0
    accepted, drafts = torch.zeros(count, dtype=torch.int64), 0
    for rows in batches:
        in_turn = torch.arange(len(rows.scored), device=rows.scored.device) % FARTHEST + 1
        hidden = torch.cat([loss.bare(rows), loss.outputs(rows, in_turn)])
        found = []
        for chunk in loss.chunks(rows):
            logp = head.logits(rows.states[rows.scored[chunk], -1]).log_softmax(-1)
            for one in hidden[:, chunk]:
                logq = head.logits(one).log_softmax(-1)
                agrees = logq.argmax(-1) == logp.argmax(-1)
                overlap = torch.minimum(logp, logq).exp().sum(-1)
                found.append(torch.stack([agrees, overlap, torch.linalg.vecdot(logp.exp(), logp - logq)]))
        by_network = [torch.cat(found[index::count], dim=-1) for index in range(count)]
        results = torch.stack(by_network).cpu()  # [networks, 3, n]
        sums += results.double().sum(-1)
        num_rows += len(rows.scored)
        runs, starts = accepted_runs(results[:, 0].bool(), rows.stretches().cpu())
        accepted += runs
        drafts += starts
    figures = torch.cat([sums / num_rows, (accepted / drafts).unsqueeze(-1)], dim=-1).tolist()
    bare, adapted = figures[: count // 2], figures[count // 2 :]
    names = ExitQuality.__slots__
    return {
        layer: (ExitQuality(**dict(zip(names, one))), ExitQuality(**dict(zip(names, other))))
        for layer, one, other in zip(loss.layers, bare, adapted)
    }


def accepted_runs(agrees: Tensor, stretches: Tensor) -> tuple[Tensor, int]:
    """Count the accepted tokens of all greedy drafts of WINDOW, int64 [networks], and these drafts.

    agrees: bool [networks, n]. stretches: int64 [n]. Drafts start at every row that has WINDOW rows ahead in its stretch.
    """
    window = min(WINDOW, int(stretches.bincount().max()))
    holding = (stretches[: len(stretches) - window + 1] == stretches[window - 1 :]).expand(len(agrees), -1)
    accepted, drafts = torch.zeros(len(agrees), dtype=torch.int64), int(holding[0].sum())
    for place in range(window):
        holding = holding & agrees[:, place : place + holding.shape[1]]
        accepted += holding.sum(-1)
    return accepted, drafts
