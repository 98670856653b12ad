"""Replicas under Ray Serve: the app of `selfspec serve` as a deployment. Needs `pip install 'selfspec[ray]'`.

    serve run selfspec.serve.replicas:build model=MODEL num_replicas=2

Ray starts the replicas, on one machine or many, spreads requests over them, and starts a new one for one that died.
"""

# Annotations are not postponed here: Ray reads the type of `build`'s argument as it stands.

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.messages import template_of
from selfspec.serve.app import make_app
from selfspec.serve.server_settings import SAFE_POLICIES, ServerSettings, allowed_hosts, default_name


class ReplicaOptions(BaseModel):
    """Arguments of `build`, named like those of `selfspec serve`. A file that is named must be there on every machine.

    num_cpus, num_gpus: that Ray reserves for each replica; it decodes with num_cpus threads. max_waiting: texts that wait in
    a replica; more wait in Ray's proxy, where no replica's end can lose them. max_queued: requests that may wait there; more
    get status 503.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    served_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    exits: str = "auto"
    kv_dtype: str = "auto"
    policy: str | None = None
    chat_template: str | None = None
    api_key: str | None = None
    allow_host: list[str] | None = None
    allow_policy: list[str] | None = None
    share_prefixes: bool = False
    max_tokens: int | None = None
    max_context: int | None = None
    max_body_mb: float = 4
    default_chat_tokens: int = 1024
    prefix_cache: str | None = None
    batch_size: int = 8
    max_waiting: int = 8
    max_queued: int = 256
    num_replicas: int = 2
    num_cpus: float = 1
    num_gpus: float = 0


class Replica:
    """One replica: an app with its own copy of the model. `app` is Ray's, made by what `build` gives it."""

    app: FastAPI

    def check_health(self) -> None:
        """Asked by Ray every few seconds. Raises RuntimeError if the engine has ended: Ray then starts another replica."""
        if not self.app.state.scheduler.alive:
            raise RuntimeError("the engine has ended")


def build(options: ReplicaOptions) -> Application:
    """What `serve run` and a Serve configuration take. Nothing is loaded here, but in each replica."""

    def load() -> FastAPI:
        model = str(DEMO_PATH) if options.model is None else options.model
        template = template_of(options.model, options.chat_template)
        settings = ServerSettings(
            model_name=options.served_name or default_name(model),
            policy=options.policy,
            batch_size=options.batch_size,
            max_waiting=options.max_waiting,
            max_body_bytes=int(options.max_body_mb * (1 << 20)),
            default_chat_tokens=options.default_chat_tokens,
            api_key=options.api_key,
            chat_template=template.source,
            chat_stops=template.stops,
            allowed_policies=SAFE_POLICIES if options.allow_policy is None else tuple(options.allow_policy),
            allowed_hosts=allowed_hosts("0.0.0.0", options.api_key, options.allow_host or ()),  # Ray's proxy listens
            share_prefixes=options.share_prefixes,
            most_new_tokens=options.max_tokens,
            most_context=options.max_context,
        )
        generator = SelfSpecGenerator.from_pretrained(
            model,
            dtype=options.dtype,
            device=options.device,
            exits=None if options.exits == "none" else options.exits,
            prefix_cache=options.prefix_cache,
            kv_dtype=options.kv_dtype,
        )
        return make_app(generator, settings)

    deployment = serve.deployment(
        serve.ingress(load)(Replica),
        name="selfspec",
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=options.batch_size + options.max_waiting,
        max_queued_requests=options.max_queued,
    )
    return deployment.bind()
