"""Settings of all tests of the experiments."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def brief(brief_calibration: None) -> None:
    """Commands time a model's costs briefly."""
