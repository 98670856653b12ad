"""`selfspec verify --server URL`: its options, and what they ask for. No model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console

from selfspec.cli.arguments import progress
from selfspec.cli.option_groups import option

if TYPE_CHECKING:
    from selfspec.analysis.server_check.checking import CheckSettings
    from selfspec.analysis.server_check.client import ServedModel

_PANEL = "Another server (--server)"
_MOST_AT_ONCE, _MOST_PROMPTS, _MOST_TOKENS = 64, 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    server: str | None = option(
        None,
        "Instead of this engine: check a server of OpenAI's API at this address, such as http://127.0.0.1:8000/v1.",
        _PANEL,
    )
    served_model: str | None = option(None, "Its model (default: the first that it lists).", _PANEL, "--model")
    api_key: str | None = option(
        None, "Bearer token, for both servers.", _PANEL, envvar="SELFSPEC_API_KEY", show_envvar=True
    )
    fields: str | None = option(None, "JSON object of further fields for every request.", _PANEL)
    plain_server: str | None = option(
        None, "A server with the same model without speculation (default: the same server).", _PANEL
    )
    plain_model: str | None = option(None, "Name of the model without speculation (default: the same name).", _PANEL)
    plain_fields: str | None = option(
        None, 'JSON object of fields that turn speculation off, such as {"policy": "ar"} here.', _PANEL
    )
    company: list[int] | None = option(
        None, "Requests to send at once; repeatable (default: 2 and 8).", _PANEL, min=2, max=_MOST_AT_ONCE
    )
    chat: bool = option(False, "Ask as a chat, not for completions.", _PANEL, "--chat")
    expect_seeds: bool = option(
        False,
        "The server promises that a seed repeats a sampled text: a difference is a fault.",
        _PANEL,
        "--expect-seeds",
    )
    near_tie: float = option(
        0.25, "Largest difference of two tokens' log probabilities that counts as a near-tie.", _PANEL, min=0.0
    )
    logprob_tolerance: float = option(
        0.1, "Largest difference allowed between a token's log probabilities in two runs.", _PANEL, min=0.0
    )
    allow_near_ties: bool = option(
        False, "End with status 0 where texts differ at near-ties only.", _PANEL, "--allow-near-ties"
    )
    timeout: float = option(120.0, "Seconds that a request may take.", _PANEL, min=1.0)
    as_json: bool = option(False, "Print all findings as one JSON object.", _PANEL, "--json")

    def refuse_without_server(self) -> None:
        """Raise ValueError if an option is given that only a server has. The key may come from the environment."""
        for item in fields(self):
            if item.name != "api_key" and getattr(self, item.name) != item.default:
                flag = (item.metadata["flags"] or [f"--{item.name.replace('_', '-')}"])[0]
                raise ValueError(f"{flag} is for a server: add --server URL")

    @property
    def has_plain(self) -> bool:
        return any((self.plain_server, self.plain_model, self.plain_fields))


def check_named_server(asked: ServerOptions, prompts: Sequence[str], max_tokens: int, notes: Console) -> int:
    """Check it, print what was found, and return the exit status: 0 if texts do not depend on how they are asked for.

    prompts: empty for the examples. Raises ValueError for options that do not fit, and if a server cannot be asked.
    """
    try:
        from selfspec.analysis.server_check.checking import check_server
        from selfspec.analysis.server_check.screen import finding_lines
    except ModuleNotFoundError as error:
        raise ValueError(f"--server needs {error.name}: pip install 'selfspec[serve]'") from None
    settings = _settings(asked, prompts, max_tokens)
    served, plain = _served(asked, settings)
    total = settings.num_requests(plain is not None)
    notes.print(f"at most {total} requests of at most {max_tokens} tokens to {served.url}, model {served.model}")
    with progress(total, notes) as advance:
        found = check_server(served, plain, settings, advance)
    typer.echo(json.dumps(found.as_dict(), allow_nan=False) if asked.as_json else "\n".join(finding_lines(found)))
    return int(found.verdict not in ("exact", *(["near-ties"] if asked.allow_near_ties else [])))


def _settings(asked: ServerOptions, prompts: Sequence[str], max_tokens: int) -> CheckSettings:
    from selfspec.analysis.server_check.checking import CheckSettings
    from selfspec.analysis.server_check.plan import COMPANIES, EXAMPLE_PROMPTS

    if len(prompts) > _MOST_PROMPTS:
        raise ValueError(f"at most {_MOST_PROMPTS} prompts are sent to a server, got {len(prompts)}: give fewer --file")
    if max_tokens > _MOST_TOKENS:
        raise ValueError(f"--max-new-tokens must be at most {_MOST_TOKENS} for a server, got {max_tokens}")
    return CheckSettings(
        prompts=tuple(prompts) or EXAMPLE_PROMPTS,
        max_tokens=max_tokens,
        companies=tuple(sorted({*asked.company})) if asked.company else COMPANIES,
        near_tie=asked.near_tie,
        logprob_tolerance=asked.logprob_tolerance,
        expect_seeds=asked.expect_seeds,
        endpoint="chat" if asked.chat else None,
        api_key=asked.api_key or "none",
        timeout_seconds=asked.timeout,
    )


def _served(asked: ServerOptions, settings: CheckSettings) -> tuple[ServedModel, ServedModel | None]:
    from selfspec.analysis.server_check.client import ServedModel, model_names

    assert asked.server is not None

    def model_at(url: str) -> str:
        names = model_names(url, settings.api_key, settings.timeout_seconds)
        if not names:
            raise ValueError(f"{url}/models lists no model: name one with --model")
        return names[0]

    url = _address(asked.server, "--server")
    model = asked.served_model or model_at(url)
    extra = _fields(asked.fields, "--fields")
    served = ServedModel(url=url, model=model, fields=extra)
    if not asked.has_plain:
        return served, None
    other = _address(asked.plain_server, "--plain-server") if asked.plain_server else url
    name = asked.plain_model or (model if asked.plain_server is None or asked.served_model else model_at(other))
    plain = ServedModel(url=other, model=name, fields=extra | _fields(asked.plain_fields, "--plain-fields"))
    if plain == served:
        raise ValueError(
            "the model without speculation is the one that is checked: give another server, model or fields"
        )
    return served, plain


def _address(given: str, flag: str) -> str:
    """With `/v1`, if the address has no path of its own."""
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{flag} must be an address such as http://127.0.0.1:8000/v1, got {given!r}")
    return given.rstrip("/") if parts.path.strip("/") else given.rstrip("/") + "/v1"


def _fields(given: str | None, flag: str) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        read = json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is not JSON ({error})") from None
    if not isinstance(read, dict):
        raise ValueError(f'{flag} must be a JSON object such as {{"policy": "ar"}}, got {given!r}')
    return read
