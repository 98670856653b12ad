"""Commands and options that earlier versions had. Whoever uses one learns in one line what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS: dict[str, str] = {}
"""What to do instead, by the name of the command."""
OPTIONS: dict[str, str] = {
    "--data-parallel": "split the file of prompts, and decode each part in a process of its own",
}
"""What to do instead, by the option on the command line, dashes included."""


def refuse_removed(command: str, arguments: Sequence[str] = ()) -> None:
    """Raise ValueError if the command or one of its options existed once."""
    if command in COMMANDS:
        raise ValueError(f"`selfspec {command}` was removed: {COMMANDS[command]}")
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == "--":
            return
        if name in OPTIONS:
            raise ValueError(f"{name} was removed: {OPTIONS[name]}")
