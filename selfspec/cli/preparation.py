"""What the first answer of a chat needs, done while the person types: the default policy's costs, and late imports."""

from __future__ import annotations

import threading
from contextlib import suppress

from rich.console import Console

from selfspec import SelfSpecGenerator
from selfspec.engine.calibrate import measured_cost


class Preparation(threading.Thread):
    """For a model on a processor. An error is left to the answer, which meets it again."""

    def __init__(self, generator: SelfSpecGenerator) -> None:
        super().__init__(name="selfspec-preparation", daemon=True)
        self._generator, self._stopped = generator, threading.Event()

    @staticmethod
    def helps(generator: SelfSpecGenerator) -> bool:
        """Whether the default policy times the model, and may do so in a thread of its own."""
        model = generator.model
        return model.num_layers > 1 and model.device.type == "cpu"

    def run(self) -> None:
        import selfspec.engine.generation_host  # noqa: F401 (what `generate` imports when it is first called)

        with suppress(Exception):
            measured_cost(self._generator.model, self._generator.runner, self._stopped.is_set)

    def wait(self, notes: Console) -> None:
        """Until it is done. Ctrl-C leaves it running."""
        if self.is_alive():
            with notes.status("Calibrating ..."):
                self.join()

    def stop(self) -> None:
        """End it within a pass or two."""
        self._stopped.set()
        if self.is_alive():
            self.join()
