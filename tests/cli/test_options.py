"""Every way to call the engine reads the same description of its options."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

from selfspec import SelfSpecGenerator
from selfspec.cli.batch_file import OWN_OPTIONS
from selfspec.cli.generate_command import generate_command
from selfspec.options import NAMES, OPTIONS, SpeculationOptions, check_ranges
from selfspec.serve.api_requests import GenerationRequest


def test_python_shows_every_option() -> None:
    shown = inspect.signature(SelfSpecGenerator.generate).parameters
    assert [*shown] == ["self", "prompt", "messages", "streamer", *NAMES]
    assert all(shown[name].default is None for name in NAMES if name != "trace")


def test_the_command_line_has_every_option_that_can_be_written() -> None:
    shown = inspect.signature(generate_command).parameters
    assert {*OWN_OPTIONS} == {*OPTIONS} <= {*shown}
    for name, (_, option) in OPTIONS.items():
        assert option.help == "" or shown[name].annotation.__metadata__[0].help == option.help


def test_custom_generate_takes_the_options_of_speculation() -> None:
    """transformers passes on only what the signature of the callable names."""
    from selfspec.integrations.custom_generate import CustomGenerate

    assert {*get_type_hints(SpeculationOptions)} <= {*inspect.signature(CustomGenerate.__call__).parameters}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_server_allows_nothing_outside_the_range(name: str) -> None:
    for value in (-0.1, 0.0, 0.5, 1.0, 1.5, 2.0):
        try:
            check_ranges({name: value})
        except ValueError:
            with pytest.raises(ValueError, match=name):
                GenerationRequest.model_validate({"model": "m", name: value})
