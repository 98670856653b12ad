"""What the commands share: loading a checkpoint with its progress line, options' types, errors in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Protocol

import torch
import transformers
import typer
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from layerskip_models import DEMO_PATH, LayerSkipModel, load_model, load_tokenizer
from layerskip_models.checkpoints.loading import load_config, load_transformers
from layerskip_models.checkpoints.quantised import has_few_bits
from layerskip_models.output_paths import output_file, output_folder
from layerskip_models.parallel.ranks import RankError, launched_ranks
from selfspec import NonFiniteLogitsError, SelfSpecGenerator
from selfspec.cli.notes import NotesConsole
from selfspec.distributed.launch import TensorParallel, be_silent_unless_first, divides, speaks
from selfspec.engine.request import check_ids
from selfspec.visible_text import visible

MODEL_PANEL = "Model"
ModelOption = Annotated[
    str | None, typer.Option(help="Hub name or folder (default: the demo model).", rich_help_panel=MODEL_PANEL)
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16, float16, float64, int8 or int4. On a CPU, 4 to 16 bits apply to the weights only.",
        rich_help_panel=MODEL_PANEL,
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=MODEL_PANEL)]
ExitsOption = Annotated[
    str,
    typer.Option(
        help="Exit adapters to draft with: auto (those beside the checkpoint, if any), none, or a folder of train-exit's.",
        rich_help_panel=MODEL_PANEL,
    ),
]
KvDtypeOption = Annotated[
    str,
    typer.Option(
        help="What keys and values are kept in: auto (the arithmetic's own) or bfloat16 (half the memory of float32, "
        "and another model, a little).",
        rich_help_panel=MODEL_PANEL,
    ),
]
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
POLICY_HELP = (
    'For example "auto", "del", "ls:3-6" (exit after 3 layers, draft 6), "spide:3,tau=0.7", "del+dv", "ar" (plain decoding); '
    "docs/policies.md has all (default: auto)."
)


def notes_console(quiet: bool) -> Console:
    """Where everything but the generated text goes: standard error."""
    return NotesConsole(quiet=quiet or not speaks())


def load_generator(
    model: str | None,
    dtype: str,
    device: str,
    notes: Console,
    *,
    prefix_cache: int | str | None = None,
    exits: str = "auto",
    kv_dtype: str = "auto",
    tensor_parallel: TensorParallel = 1,
    device_map: Literal["auto"] | None = None,
) -> SelfSpecGenerator:
    """The checkpoint, the demo if none is named, with its tokenizer. The last arguments are those of `SelfSpecGenerator`.

    exits: as there, "none" for bare exits. tensor_parallel: 1 for a command that knows one process, None for one whose
    processes hold the whole model each. Raises ValueError for a command that knows one process, if several were launched.
    """
    if tensor_parallel == 1 and launched_ranks() > 1:
        raise ValueError("this command runs in one process: start it without torchrun")
    if divides(tensor_parallel if launched_ranks() > 1 else None):
        be_silent_unless_first()
    with loading(model, notes) as name:
        return SelfSpecGenerator.from_pretrained(
            name,
            dtype=dtype,
            device=device,
            local_files_only=model is None,
            prefix_cache=prefix_cache,
            exits=None if exits == "none" else exits,
            kv_dtype=kv_dtype,
            tensor_parallel=tensor_parallel,
            device_map=device_map,
        )


def load_full_weights(model: str | None, dtype: str, device: str, notes: Console) -> LayerSkipModel:
    """The checkpoint with all bits of its weights, to compare one with. dtype: of that one.

    Errors as `load_generator`'s; ValueError where that one has all bits, too.
    """
    with loading(model, notes) as name:
        local = model is None
        few_bits = has_few_bits(load_config(name, local_files_only=local))
        if dtype in ("float32", "float64") or (dtype == "auto" and not few_bits):
            raise ValueError(
                "--quality compares weights in fewer bits with the full ones: add --dtype int4, int8 or bfloat16, or name a "
                "checkpoint that is quantised"
            )
        return load_model(name, dtype="float32", device=device, exits=None, local_files_only=local)


def load_reference(
    model: str | None, texts: Sequence[str], dtype: str, device: str, notes: Console
) -> tuple[transformers.PreTrainedModel, list[torch.Tensor]]:
    """The checkpoint as transformers loads it, and prompts as its token ids, int64 [n] each. Errors as `load_generator`'s."""
    with loading(model, notes) as name:
        llama = load_transformers(name, dtype=dtype, device=device, local_files_only=model is None)
        tokenizer = load_tokenizer(name, local_files_only=model is None)
    prompts = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long) for text in texts]
    if any(prompt.numel() == 0 for prompt in prompts):
        raise ValueError("a prompt has no tokens: give one with text")
    for prompt in prompts:
        check_ids(prompt, llama.config.vocab_size, from_tokenizer=True)
    return llama, prompts


@contextmanager
def loading(model: str | None, notes: Console) -> Iterator[str]:
    """A status line while a checkpoint is loaded; yields its name."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # the status line says it, and goes away
    hub_logging.set_verbosity_error()  # its retries
    name = str(DEMO_PATH) if model is None else model
    with notes.status(f"Loading {'the demo model' if model is None else model} ..."):
        yield name


class Advance(Protocol):
    """Moves a progress bar on and says what was done; by 0 says only what is being done."""

    def __call__(self, label: str, amount: int = 1) -> None: ...


@contextmanager
def progress(total: int, notes: Console) -> Iterator[Advance]:
    """A progress bar with the time left, removed at the end; yields a function that advances it by one with a label."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda label, amount=1: bar.update(task, advance=amount, description=label)


def checked_output_file(path: Path | None) -> Path | None:
    """Callback of an option: fails before the command runs if the file could not be written."""
    with one_line_errors():
        return None if path is None else output_file(path)


def checked_output_folder(path: Path | None) -> Path | None:
    """The same for a folder of results, which is created."""
    with one_line_errors():
        return None if path is None else output_folder(path)


def check_sampling(defaults: transformers.GenerationConfig, options: dict[str, Any]) -> bool:
    """Whether decoding is greedy. ValueError if it is and an option would then do nothing. defaults: the checkpoint's."""
    if options["temperature"] == 0:  # another way to ask for the likeliest token
        options["do_sample"], options["temperature"] = False, None
    do_sample = options["do_sample"]
    if do_sample is None:
        do_sample = defaults.do_sample
    given = [name for name in _SAMPLING_FIELDS if options[name] is not None]
    if given and not do_sample:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags} has no effect on greedy decoding: add --do-sample, or leave it out")
    return not do_sample


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error as one line. Exit status 2 for errors that the user can fix, 1 for a model that cannot go on."""
    try:
        yield
    except BrokenPipeError:  # `| head`: typer ends quietly
        raise
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    except (NonFiniteLogitsError, torch.OutOfMemoryError, RankError) as error:
        _fail(error, 1)
    except (ValueError, TypeError, OSError) as error:
        _fail(error, 2)


def _fail(error: Exception, status: int) -> NoReturn:
    if speaks():
        typer.echo(f"error: {visible(' '.join(str(error).split()))}", err=True)
    raise typer.Exit(status) from None
