"""The options that commands of `selfspec-bench` share, one type for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.datasets import COPYING, shipped_names
from layerskip_models.output_paths import output_file
from selfspec.cli.console import one_line_errors


def _record_path(path: Path | None) -> Path | None:
    """Fails before anything runs if the record could not be written."""
    with one_line_errors():
        return None if path is None else output_file(path, replaced=True)


ModelOption = Annotated[
    str | None,
    typer.Option(
        help='LayerSkip checkpoint: folder, hub name, or "synthetic:SHAPE" (random weights of that shape). Default: the demo.'
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
TaskSamplesOption = Annotated[int, typer.Option(min=1, help="Number of prompts of each task.")]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Maximum prompt length; longer prompts keep their end.")]
NewTokensOption = Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed runs of each engine on each prompt.")]
WarmupsOption = Annotated[int, typer.Option(min=0, help="Untimed runs of each engine before the timed ones.")]
KeptOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Policy to run a second time without forgetting between prompts, as in ordinary use; repeatable. "
        "'all' means every policy of the run that learns. Not with --resume."
    ),
]
PeersOption = Annotated[
    bool, typer.Option("--peers/--no-peers", help="Measure transformers' own decoding in the same run.")
]
DoSampleOption = Annotated[
    bool,
    typer.Option("--do-sample", help="Sample instead of decoding greedily; every repeat of a prompt has another seed."),
]
TemperatureOption = Annotated[float | None, typer.Option(help="Sampling temperature, with --do-sample (default 1).")]
TopPOption = Annotated[float | None, typer.Option(help="Top-p, with --do-sample (default 1: all tokens).")]
TopKOption = Annotated[int | None, typer.Option(help="Top-k, with --do-sample (default 0: all tokens).")]
SeedOption = Annotated[int | None, typer.Option(help="Random seed of the first repeat, with --do-sample (default 0).")]
DtypeOption = Annotated[
    str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16, float16, float64, int8 or int4 (weights).")
]
LLAMA_CPP_KINDS = ("BF16", "F16", "Q8_0", "Q4_0")
"""What the weights are written as for llama.cpp."""
GGUF_KINDS = ("Q4_K_M", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q8_0", "Q4_0", "Q4_1")
"""Types of GGUF files whose numbers our kernels keep."""
GgufOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Also run selfspec, and llama.cpp where its package is, on one GGUF file of the weights as "
        f"{', '.join(GGUF_KINDS)}; repeatable. Needs gguf."
    ),
]
LlamaCppOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Also run llama.cpp on the same weights as {', '.join(LLAMA_CPP_KINDS)}; repeatable; 'all' means all "
        "of them. Needs llama-cpp-python and gguf. The GGUF file is written to the temporary folder (TMPDIR) and "
        "removed once it is loaded."
    ),
]
IkLlamaCppOption = Annotated[
    list[str] | None, typer.Option(help="The same for ik_llama.cpp. Needs ik-llama-cpp-python and gguf.")
]
OpenVinoOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder with the model as OpenVINO stores it, for OpenVINO GenAI, too; repeatable. Needs openvino-genai.",
    ),
]
PeerTimeoutOption = Annotated[
    float, typer.Option(min=1, help="Seconds that a peer may take to load, or for one text, before it is left out.")
]
KvDtypeOption = Annotated[
    str, typer.Option(help="What our engine keeps keys and values in: auto (the arithmetic's own) or bfloat16.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
RunnerOption = Annotated[
    str, typer.Option(help="eager or auto, which are the same at present. graphs warns, and decodes eagerly.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the record, JSON lines, to this file.", callback=_record_path),
]
