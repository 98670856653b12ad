"""Which rows of a batch each process computes, and which rows of a divided tensor it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The rows of one forward and backward pass of one process.

    rows: indices in the batch. real: the number of them that count, from the front. The others are padding, which lets this
    process take part in the messages of the others; they must get no loss. together: the rows that all processes which
    exchange messages in this pass compute, this process's included.
    """

    rows: list[int]
    real: int
    together: list[int]


def micro_batches(num_rows: int, rows_at_once: int, rank: int, ranks: int, *, in_step: bool) -> list[MicroBatch]:
    """A process's share of a batch of num_rows rows, every ranks-th of them, in passes of rows_at_once.

    in_step: every process gets the same number of passes and of rows in each, padded where the batch does not divide.
    Otherwise the processes do not wait for each other, and one may have fewer rows, or none.
    """
    if not in_step:
        mine = list(range(rank, num_rows, ranks))
        pieces = [mine[start : start + rows_at_once] for start in range(0, len(mine), rows_at_once)]
        return [MicroBatch(rows=rows, real=len(rows), together=rows) for rows in pieces]
    most = -(-num_rows // ranks)
    found = []
    for start in range(0, most, rows_at_once):
        places = range(start, min(start + rows_at_once, most))
        together = [row for place in places for row in range(place * ranks, min((place + 1) * ranks, num_rows))]
        real = [row for place in places if (row := place * ranks + rank) < num_rows]
        stand_ins = [together[0]] * (len(places) - len(real))
        found.append(MicroBatch(rows=real + stand_ins, real=len(real), together=together))
    return found


def rows_of(num_rows: int, rank: int, ranks: int) -> range:
    """The rows of a tensor that one of `ranks` processes holds, as torch.chunk cuts: the last may have fewer, or none."""
    most = -(-num_rows // ranks)
    return range(min(rank * most, num_rows), min((rank + 1) * most, num_rows))
