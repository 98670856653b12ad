"""The options that commands of `selfspec-bench` share, one type for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.datasets import COPYING, shipped_names
from layerskip_models import DEMO_PATH
from layerskip_models.output_paths import output_file
from selfspec.cli.console import one_line_errors


def _record_path(path: Path | None) -> Path | None:
    """Fail before anything runs if the record could not be written."""
    with one_line_errors():
        return None if path is None else output_file(path, replaced=True)


DEMO = str(DEMO_PATH)
ModelOption = Annotated[
    str,
    typer.Option(
        show_default=False,
        help='LayerSkip checkpoint: folder, hub name, or "synthetic:SHAPE" (random weights of that shape). '
        "Default: the demo.",
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help='Prompts, .jsonl[.gz] with "id", "task", "prompt"; or shipped ones by name: '
        f"{', '.join(shipped_names())}. Default: the shipped ones but {COPYING}."
    ),
]
NumSamplesOption = Annotated[int, typer.Option(min=1, help="Number of prompts, taken from each task in turn.")]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Maximum prompt length; longer prompts keep their end.")]
NewTokensOption = Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed runs of each engine on each prompt.")]
WarmupsOption = Annotated[int, typer.Option(min=0, help="Untimed runs of each engine before the timed ones.")]
KeptOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Policy to run a second time without forgetting between prompts, as in ordinary use; repeatable. "
        "'all' means every policy of the run that learns."
    ),
]
DtypeOption = Annotated[
    str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16, float16, float64, int8 or int4 (weights).")
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Engine beside selfspec, repeatable: transformers; selfspec:KIND (int8, int4, or a type of GGUF file); "
        "llama.cpp:KIND or ik_llama.cpp:KIND (BF16, F16, Q8_0, Q4_0); openvino:FOLDER. Where --model is a GGUF file, the "
        "last three read it as it is without a KIND. A file of a KIND is written to the temporary folder (TMPDIR). Default: "
        "transformers, or of a GGUF file those that are installed; 'none' for none."
    ),
]
PeerTimeoutOption = Annotated[
    float, typer.Option(min=1, help="Seconds that a peer may take to load, or for one text, before it is left out.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Write the record, JSON lines, to this file. If a run of the same command broke off there, it goes on.",
        callback=_record_path,
    ),
]
