"""What the commands share: loading a checkpoint with a status line, progress bars, and checks of what was given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from layerskip_models import load_tokenizer
from layerskip_models.checkpoints.conversion import telling
from layerskip_models.checkpoints.loading import load_transformers
from layerskip_models.lazy_imports import gc_paused
from policies import Policy
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import CopyStore, copies_drafts
from selfspec.cli.option_groups import LoadOptions
from selfspec.engine.request import check_ids
from selfspec.options import SamplingOptions

if TYPE_CHECKING:
    import transformers


def load_generator(
    model: str,
    load: LoadOptions,
    log: Console,
    *,
    prefix_cache: int | str | None = None,
    several_processes: bool = False,
    device_map: Literal["auto"] | None = None,
) -> SelfSpecGenerator:
    """Load the checkpoint and its tokenizer. several_processes: the command may be one of several with the model."""
    if not several_processes and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("this command runs in one process: start it without torchrun (device_map='auto', or replicas)")
    with _loading(model, log):
        return load.generator(model, prefix_cache=prefix_cache, device_map=device_map)


def load_reference(
    model: str, texts: Sequence[str], dtype: str, device: str, log: Console
) -> tuple[transformers.PreTrainedModel, list[torch.Tensor]]:
    """Load the checkpoint as transformers does, and encode the prompts, int64 [n] each. Raises ValueError for empty ones."""
    with _loading(model, log):
        llama = load_transformers(model, dtype=dtype, device=device)
        tokenizer = load_tokenizer(model)
    prompts = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long) for text in texts]
    for prompt in prompts:
        if prompt.numel() == 0:
            raise ValueError("a prompt has no tokens: give one with text")
        check_ids(prompt, llama.config.vocab_size, from_tokenizer=True)
    return llama, prompts


@contextmanager
def _loading(model: str, log: Console) -> Iterator[None]:
    """Show a status line while a checkpoint is loaded."""
    text = f"Loading {model} ..."

    def on_progress(done: int, total: int) -> None:
        status.update(f"{text} {done} of {total} layers")

    with log.status(text) as status, gc_paused(), telling(on_progress):
        import transformers
        from huggingface_hub.utils import logging as hub_logging

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()  # the status line replaces it
        hub_logging.set_verbosity_error()  # its retries
        yield


@contextmanager
def progress_bar(total: int, log: Console, done: int = 0) -> Iterator[Callable[[str], None]]:
    """Show a progress bar with the time left; yield the function that advances it and shows a label."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=log, transient=True, disable=log.quiet) as bar:
        task = bar.add_task("starting", total=total, completed=done)
        yield lambda label: bar.update(task, advance=1, description=label)


def check_sampling(defaults: transformers.GenerationConfig, options: SamplingOptions) -> bool:
    """Return whether decoding is greedy; a temperature of 0 is taken out. Raises ValueError for options without effect."""
    if options["temperature"] == 0:
        options["do_sample"], options["temperature"] = False, None
    do_sample = defaults.do_sample if options["do_sample"] is None else options["do_sample"]
    given = [name for name in ("temperature", "top_k", "top_p", "min_p") if options.get(name) is not None]
    if given and not do_sample:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags} has no effect on greedy decoding: add --do-sample, or leave it out")
    return not do_sample


def store_of_files(
    generator: SelfSpecGenerator, texts: Sequence[str], policy: Policy | None = None
) -> CopyStore | None:
    """Make a copy store of the texts, None without any. Raises ValueError if `policy` copies nothing."""
    if not texts:
        return None
    if policy is not None and not copies_drafts(policy.observes):
        raise ValueError(f"--copy-from has no effect with policy {policy.name!r}: use auto, or copy")
    return generator.copy_store(texts)
