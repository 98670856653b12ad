"""Replicas under Ray Serve: the app of `selfspec serve` as a deployment. Needs `pip install 'selfspec[ray]'`.

    serve run selfspec.serve.replicas:build model=MODEL num_replicas=2

Ray starts the replicas on one or several machines, distributes requests over them, and replaces a replica that died.
"""

# No postponed annotations here: Ray needs the class of `build`'s argument, not its name.

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from selfspec.serve.app import make_app
from selfspec.serve.replica_options import ReplicaOptions


class Replica:
    """One replica: an app with its own copy of the model. Ray makes `app` with the function that `build` gives it."""

    app: FastAPI

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has ended: Ray, which asks every few seconds, then starts another."""
        if not self.app.state.scheduler.alive:
            raise RuntimeError("the engine has ended")


def build(options: ReplicaOptions) -> Application:
    """Build the application for `serve run` or a Serve configuration. Each replica loads the model; this does not."""

    def load() -> FastAPI:
        return make_app(options.generator(), options.settings())

    deployment = serve.deployment(
        serve.ingress(load)(Replica),
        name="selfspec",
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=options.batch_size + options.max_waiting,
        max_queued_requests=options.max_queued,
    )
    return deployment.bind()
