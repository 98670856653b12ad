"""Replicas under Ray Serve: the app of `selfspec serve` as a deployment. Needs `pip install -e '.[ray]'`.

    serve run selfspec.serve.replicas:build model=MODEL num_replicas=2

Ray starts the replicas on one or several machines, distributes requests over them, and replaces a replica that died.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from selfspec.cli.option_groups import LoadOptions
from selfspec.serve.serve_options import ServeOptions

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

_LISTS = ("allow_policy", "allow_host", "allow_origin", "copy_from")  # on Ray's command line each is one text
_OF_RAY = ("host", "port", "grace_seconds", "access_log")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """max_queued: requests that may wait in Ray's proxy; more get status 503. num_cpus, num_gpus: of each replica."""

    num_replicas: int = 2
    num_cpus: float = 1
    num_gpus: float = 0
    max_queued: int = 256


def read_arguments(given: dict[str, Any]) -> tuple[LoadOptions, ServeOptions, RayOptions]:
    """Check the arguments of `build`: the options of `selfspec serve` that are not Ray's own, and `RayOptions`.

    8 texts wait in a replica unless told otherwise. Any host name may be used unless some are given, since the address is
    Ray's. Raises ValueError for an unknown name or a wrong value.
    """
    lists = {name: [given[name]] for name in _LISTS if isinstance(given.get(name), str)}
    given = {"max_waiting": 8, **given, **lists}
    groups: list[Any] = []
    for group in (LoadOptions, ServeOptions, RayOptions):
        names = {field.name for field in fields(group)} - {*_OF_RAY}
        groups.append(TypeAdapter(group).validate_python({name: given.pop(name) for name in names & given.keys()}))
    if given:
        raise ValueError(f"{', '.join(sorted(given))}: there is no such argument of a replica")
    load, serve, ray = groups
    return load, replace(serve, host="0.0.0.0"), ray


class Replica:
    """One replica: an app with its own copy of the model. Ray makes `app` with the function that `build` gives it."""

    app: FastAPI

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has ended: Ray, which asks every few seconds, then starts another."""
        if not self.app.state.scheduler.alive:
            raise RuntimeError("the engine has ended")


def build(arguments: dict[str, Any]) -> Application:
    """Build the application for `serve run` or a Serve configuration. Each replica loads the model; this does not."""
    from ray import serve

    load, options, ray = read_arguments(arguments)

    def make() -> FastAPI:
        from selfspec.serve.app import make_app

        options.check()
        return make_app(load.generator(options.model, prefix_cache=options.prefix_cache), options)

    deployment = serve.deployment(
        serve.ingress(make)(Replica),
        name="selfspec",
        num_replicas=ray.num_replicas,
        ray_actor_options={"num_cpus": ray.num_cpus, "num_gpus": ray.num_gpus},
        max_ongoing_requests=options.batch_size + options.max_waiting,
        max_queued_requests=ray.max_queued,
    )
    return deployment.bind()
