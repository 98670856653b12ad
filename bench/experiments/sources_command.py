"""`add-sources`: for records that were made before they kept digests of their code, or by code that did not keep them yet."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

import typer

from bench.record import read_record
from bench.sources import with_sources
from layerskip_models.output_paths import output_file
from selfspec.cli.notes import one_line_errors


def add_sources(records: Annotated[list[Path], typer.Argument(help="Records, .jsonl or .jsonl.gz.")]) -> None:
    """Write into records which code they measured, as git's history has it for their commit. Numbers stay as they are."""
    with one_line_errors():
        for path in records:
            first, *rest = read_record(path)
            found = with_sources(first)
            if found is first:
                reason = (
                    "has digests of its code" if "sources" in first["provenance"] else "names no commit that is here"
                )
                typer.echo(f"{path} {reason}: not changed")
                continue
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (found, *rest)).encode()
            target = output_file(path, replaced=True)
            target.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
            typer.echo(f"{path} now says what its code was at {first['provenance']['commit']}")
