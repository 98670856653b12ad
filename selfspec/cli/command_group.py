"""The group of commands that both programs, `selfspec` and `selfspec-bench`, are."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from selfspec.cli.console import one_line_errors
from selfspec.removed import refuse_removed


class CommandGroup(TyperGroup):
    """Commands of one program, which is its name. Whoever uses what was removed learns what to use instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with one_line_errors():
            refuse_removed(args[0], args[1:], program=str(self.name))
        return super().resolve_command(ctx, args)
