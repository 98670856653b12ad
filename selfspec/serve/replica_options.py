"""The arguments of `selfspec.serve.replicas:build`: the options of `selfspec serve`, and Ray's."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BeforeValidator, ConfigDict, create_model

from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.cli.option_groups import LoadOptions
from selfspec.serve.serve_options import ServeOptions
from selfspec.serve.server_settings import ServerSettings


def _one_or_several(value: object) -> object:
    """On Ray's command line one value is a text; in a configuration it may be a list."""
    return [value] if isinstance(value, str) else value


def _fields(group: type[Any]) -> dict[str, Any]:
    """Give the fields of a group of command-line options as pydantic takes them."""
    hints = get_type_hints(group)
    for name, kind in hints.items():
        if any(part is list or getattr(part, "__origin__", None) is list for part in get_args(kind)):
            hints[name] = Annotated[kind, BeforeValidator(_one_or_several)]
    return {field.name: (hints[field.name], field.default) for field in fields(group)}


_OfServe: Any = create_model(
    "_OfServe", __config__=ConfigDict(extra="forbid"), **_fields(LoadOptions), **_fields(ServeOptions)
)


class ReplicaOptions(_OfServe):
    """Arguments of `build`, named like those of `selfspec serve`. Files that are named must exist on every machine.

    max_waiting: texts that may wait in a replica. max_queued: requests that may wait in Ray's proxy, where they survive the
    loss of a replica; further ones get status 503. num_cpus, num_gpus: what Ray reserves for each replica, which decodes with
    num_cpus threads. allow_host: any host name unless some are given, since the address is Ray's.
    """

    model: str | None = None
    max_waiting: int = 8
    max_queued: int = 256
    num_replicas: int = 2
    num_cpus: float = 1
    num_gpus: float = 0

    def settings(self) -> ServerSettings:
        """Make the settings of each replica's app. Reads the files named; raises OSError and ValueError for them."""
        return ServeOptions(**self._of(ServeOptions)).settings(self.model, "0.0.0.0")  # Ray's proxy listens

    def generator(self) -> SelfSpecGenerator:
        """Load the model, in a replica's process. Raises OSError and ValueError if it cannot be loaded."""
        name = str(DEMO_PATH) if self.model is None else self.model
        return LoadOptions(**self._of(LoadOptions)).generator(name, prefix_cache=self.prefix_cache)

    def _of(self, group: type[Any]) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(group)}
