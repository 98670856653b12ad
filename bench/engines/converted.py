"""A model's weights in the formats of other engines, all made on this machine from the same numbers.

A folder holds them by name: `weights` (bfloat16, as transformers saves them), a GGUF file for each number of bits, and what
the other engines' own converters make of `weights`. What a converter says when it refuses is kept in a text file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "weights"
GGUF_KINDS: Mapping[int, str] = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}
"""The type of a GGUF file by its bits."""
_SHOWN = 300  # characters of what a converter says


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """Another engine's converter.

    label: the engine's name. module: what it is run as, by `python -m`. package: what to install for it. kinds: what it is
    asked for, by bits. arguments: of the module, where FROM is the folder with the weights, TO the new one, KIND the kind.
    extra: more of them, by kind.
    """

    label: str
    module: str
    package: str
    kinds: Mapping[int, str]
    arguments: tuple[str, ...]
    extra: Mapping[str, tuple[str, ...]]

    def command(self, python: str, folder: Path, kind: str, target: Path) -> list[str]:
        """The command line that makes `target` from the weights in `folder`."""
        places = {"FROM": str(folder / WEIGHTS), "TO": str(target), "KIND": kind}
        arguments = [places.get(argument, argument) for argument in self.arguments]
        return [python, "-m", self.module, *arguments, *self.extra.get(kind, ())]


CONVERTERS: Mapping[str, Converter] = {
    "openvino": Converter(
        label="OpenVINO GenAI",
        module="optimum.commands.optimum_cli",
        package="optimum-intel[openvino]",
        kinds={16: "fp16", 8: "int8", 4: "int4"},
        arguments=(
            "export", "openvino", "-m", "FROM", "--task", "text-generation-with-past", "--weight-format", "KIND", "TO",
        ),
        extra={"int4": ("--group-size", "64")},
    ),
    "onnxruntime": Converter(
        label="ONNX Runtime GenAI",
        module="onnxruntime_genai.models.builder",
        package="onnxruntime-genai onnx onnx-ir",
        kinds={16: "fp32", 8: "int8", 4: "int4"},  # it has nothing in 16 bits for a CPU
        arguments=("-i", "FROM", "-o", "TO", "-p", "KIND", "-e", "cpu", "-c", "TO"),
        extra={},
    ),
    "ctranslate2": Converter(
        label="CTranslate2",
        module="ctranslate2.converters.transformers",
        package="ctranslate2",
        kinds={16: "bfloat16", 8: "int8", 4: "int4"},
        arguments=("--model", "FROM", "--output_dir", "TO", "--quantization", "KIND"),
        extra={},
    ),
}  # fmt: skip
"""By the beginning of the names that they write: `openvino-int8`, and so on."""


def save_weights(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model in bfloat16, and GGUF files of those same numbers. Raises ValueError as `write_gguf`."""
    from bench.engines.gguf_file import write_gguf  # its package is optional

    rounded = network.to(torch.bfloat16)
    rounded.save_pretrained(folder / WEIGHTS)
    tokenizer.save_pretrained(folder / WEIGHTS)
    for kind in GGUF_KINDS.values():
        write_gguf(rounded, folder / f"{kind}.gguf", kind)


def can_convert(engine: str, python: str) -> bool:
    """Whether a converter can be run by this Python."""
    asked = f"import importlib.util as u, sys; sys.exit(u.find_spec({CONVERTERS[engine].module.partition('.')[0]!r}) is None)"
    return subprocess.run([python, "-c", asked], check=False, capture_output=True).returncode == 0


def convert(engine: str, bits: int, folder: Path, python: str) -> str | None:
    """Make what an engine reads for this many bits; nothing is downloaded. Returns what the converter said if it refused.

    What is there already stays.
    """
    converter = CONVERTERS[engine]
    kind = converter.kinds[bits]
    target, refused = folder / f"{engine}-{kind}", _refusal_file(folder, engine, kind)
    if target.is_dir():
        return None
    command = converter.command(python, folder, kind, target)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", env=offline)
    if done.returncode == 0 and target.is_dir():
        refused.unlink(missing_ok=True)
        return None
    shutil.rmtree(target, ignore_errors=True)
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    said = lines[-1].replace(str(folder), "")[-_SHOWN:] if lines else f"it ended with status {done.returncode}"
    refused.write_text(f"{said}\n", encoding="utf-8")
    return said


def converted(engine: str, bits: int, folder: Path) -> Path:
    """What `convert` made. Raises ValueError with what the converter said, or with how to make it."""
    kind = CONVERTERS[engine].kinds[bits]
    place, refused = folder / f"{engine}-{kind}", _refusal_file(folder, engine, kind)
    if place.is_dir():
        return place
    if refused.is_file():
        raise ValueError(f"its converter refused {kind}: {refused.read_text(encoding='utf-8').strip()}")
    raise ValueError(f"{folder.name} has no {place.name}: make it with selfspec-bench convert")


def _refusal_file(folder: Path, engine: str, kind: str) -> Path:
    return folder / f"{engine}-{kind}.refused.txt"
