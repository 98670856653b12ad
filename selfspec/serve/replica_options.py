"""What `selfspec.serve.replicas:build` is told: the options of `selfspec serve`, and Ray's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from layerskip_models import DEMO_PATH
from selfspec import SelfSpecGenerator
from selfspec.cli.copy_files import read_copy_files
from selfspec.messages import template_of
from selfspec.serve.server_settings import SAFE_POLICIES, ServerSettings, allowed_hosts, default_name


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Several = Annotated[list[str], BeforeValidator(_one_or_several)]
"""On Ray's command line one text, in a configuration a list."""


class ReplicaOptions(BaseModel):
    """Arguments of `build`, named like those of `selfspec serve`. A file that is named must be there on every machine.

    num_cpus, num_gpus: that Ray reserves for each replica; it decodes with num_cpus threads. max_waiting: texts that wait in
    a replica; more wait in Ray's proxy, where no replica's end can lose them. max_queued: requests that may wait there; more
    get status 503. allow_host: names by which clients may call beside localhost; every name unless some are
    given, for the address is Ray's.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    served_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    exits: str = "auto"
    kv_dtype: str = "auto"
    policy: str | None = None
    allow_policy: Several | None = None
    copy_from: Several = []
    chat_template: str | None = None
    api_key: str | None = None
    allow_host: Several | None = None
    prefix_cache: str | None = None
    share_prefixes: bool = False
    max_tokens: int | None = None
    max_context: int | None = None
    max_body_mb: float = 4
    default_chat_tokens: int = 1024
    batch_size: int = 8
    max_waiting: int = 8
    max_queued: int = 256
    num_replicas: int = 2
    num_cpus: float = 1
    num_gpus: float = 0

    def settings(self) -> ServerSettings:
        """Those of the app in each replica. Reads the files that are named; raises OSError and ValueError of these."""
        template = template_of(self.model, self.chat_template)
        return ServerSettings(
            model_name=self.served_name or default_name(self._model),
            policy=self.policy,
            batch_size=self.batch_size,
            max_waiting=self.max_waiting,
            max_body_bytes=int(self.max_body_mb * (1 << 20)),
            default_chat_tokens=self.default_chat_tokens,
            api_key=self.api_key,
            copy_from=tuple(read_copy_files([Path(path) for path in self.copy_from])),
            chat_template=template.source,
            chat_stops=template.stops,
            allowed_policies=SAFE_POLICIES if self.allow_policy is None else tuple(self.allow_policy),
            allowed_hosts=allowed_hosts("0.0.0.0", self.api_key, self.allow_host or ()),  # Ray's proxy listens
            share_prefixes=self.share_prefixes,
            most_new_tokens=self.max_tokens,
            most_context=self.max_context,
        )

    def generator(self) -> SelfSpecGenerator:
        """The model, in a replica's process. Raises OSError and ValueError if it cannot be loaded."""
        return SelfSpecGenerator.from_pretrained(
            self._model,
            dtype=self.dtype,
            device=self.device,
            exits=None if self.exits == "none" else self.exits,
            prefix_cache=self.prefix_cache,
            kv_dtype=self.kv_dtype,
        )

    @property
    def _model(self) -> str:
        return str(DEMO_PATH) if self.model is None else self.model
