"""Ctrl-C as a stop condition: what was generated is kept and counted."""

from __future__ import annotations

import signal
from types import FrameType

from torch import Tensor
from transformers import StoppingCriteria


class InterruptCriteria(StoppingCriteria):
    """Ends the text at the next token after Ctrl-C; a second Ctrl-C is an ordinary KeyboardInterrupt.

    A context manager, to be entered in the main thread: the signal is caught only inside.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> InterruptCriteria:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> bool:
        return self.requested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
