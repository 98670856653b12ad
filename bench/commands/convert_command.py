"""`selfspec-bench convert`: one model's weights in the formats of the engines that `peers --converted` measures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.commands import bench_options as options
from bench.commands.preparation import load_network, open_tokenizer
from bench.engines.converted import CONVERTERS, WEIGHTS, can_convert, convert, save_weights
from layerskip_models import DEMO_PATH
from layerskip_models.output_paths import output_folder
from selfspec.cli.notes import one_line_errors


def _folder(path: Path) -> Path:
    """Fails before anything is loaded if the folder could not be written."""
    with one_line_errors():
        return output_folder(path)


def convert_weights(
    output_dir: Annotated[Path, typer.Option(help="Folder for the weights in every format.", callback=_folder)],
    model: options.ModelOption = None,
    python: Annotated[
        str, typer.Option(help="Python of an environment that has converters, which need other packages than selfspec.")
    ] = sys.executable,
) -> None:
    """Write a Llama model's weights for `peers --converted`: in bfloat16, as GGUF files, and by other engines' converters.

    Converters are those of OpenVINO (optimum-intel), ONNX Runtime GenAI and CTranslate2, as far as --python has them. Run the
    command once for each environment: what is in the folder already stays. What a converter refuses is noted there.
    """
    with one_line_errors():
        if not (output_dir / WEIGHTS).is_dir():
            checkpoint = str(model or DEMO_PATH)
            save_weights(load_network(checkpoint, "auto", "cpu"), open_tokenizer(checkpoint), output_dir)
            typer.echo(f"{WEIGHTS} and GGUF files: written")
        for engine, converter in CONVERTERS.items():
            if not can_convert(engine, python):
                typer.echo(f"{converter.label} is left out: --python has no {converter.package}", err=True)
                continue
            for bits, kind in converter.kinds.items():
                refused = convert(engine, bits, output_dir, python)
                typer.echo(f"{engine}-{kind}: {'written' if refused is None else f'refused: {refused}'}")
