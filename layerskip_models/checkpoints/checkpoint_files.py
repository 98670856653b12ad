"""Finds a checkpoint's folder, and says in one line why the hub does not give its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import GatedRepoError

from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from layerskip_models.checkpoints.named_models import named_file
from layerskip_models.checkpoints.weight_files import FILE, INDEX

_WEIGHTS = (FILE, INDEX)


def resolve_checkpoint(name_or_path: str | Path) -> str:
    """Return the folder or hub name to load from.

    A GGUF file, or a folder with one, is a checkpoint, too. The output folder of `selfspec train` stands for the `model/`
    folder inside it. A short name such as "smollm2" stands for the file that `selfspec get` downloads, unless a folder here
    has that name. `~` is expanded.
    Raises ValueError for several GGUF files, FileNotFoundError where a path names no folder, one without a checkpoint, or an
    unfinished training run, and for a short name whose file was not downloaded.
    """
    name = str(name_or_path)
    folder = Path(name)
    named = None if folder.exists() else named_file(name)
    if named is not None:
        return str(named)
    if name.startswith("~"):
        try:
            folder = folder.expanduser()
        except RuntimeError:  # no home folder is known
            raise FileNotFoundError(f"cannot expand {name}: the home folder is unknown, give the whole path") from None
    if gguf_file(str(folder)) is not None:
        return str(folder)
    if not folder.is_dir():
        if folder.is_file():
            raise FileNotFoundError(
                f"{name} is a file: give the folder with config.json and *.safetensors, or a .gguf file"
            )
        if name.startswith((".", "/", "~")) or "\\" in name:  # written as a path, so it cannot be a hub name
            raise FileNotFoundError(f"no checkpoint folder at {name}: give a folder with config.json and *.safetensors")
        return name
    if not any((folder / weights).exists() for weights in _WEIGHTS):
        if (folder / "model" / "config.json").is_file():
            return str(folder / "model")
        if (folder / "checkpoints").is_dir():
            raise FileNotFoundError(
                f"{name} holds a training run that is not finished: repeat its `selfspec train` command to finish it"
            )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{name} holds no checkpoint: it has no config.json; give a folder with config.json and *.safetensors"
        )
    return str(folder)


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turn what transformers says of a checkpoint that it cannot get into one line that names the remedy, an OSError."""
    try:
        yield
    except GatedRepoError as error:
        raise OSError(
            f"{name} is a gated checkpoint: ask for access on its hub page, then log in with `hf auth login`"
        ) from error
    except OSError as error:
        if not Path(name).is_dir() and ("connect" in str(error) or "offline" in str(error)):
            raise OSError(
                f"{name} is neither a folder here nor in the local cache, and the hub cannot be reached: "
                "check the name and the network, or give a local folder"
            ) from error
        raise
