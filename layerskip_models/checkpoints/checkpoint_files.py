"""Finds a checkpoint's folder and the files of its weights, and says in one line why the hub does not give them.

Weights are read from the files that transformers would read: `model.safetensors` if there is one, else all that
`model.safetensors.index.json` names, whatever else lies in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from layerskip_models.checkpoints.named_models import named_file

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN, _MEANT = "copy or download it again", "config.json and *.safetensors"


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
            raise FileNotFoundError(f"{name} is a file: give the folder with {_MEANT}, or a .gguf file")
        if name.startswith((".", "/", "~")) or "\\" in name:  # written as a path, so it cannot be a hub name
            raise FileNotFoundError(f"no checkpoint folder at {name}: give a folder with {_MEANT}")
        return name
    if not any((folder / weights).exists() for weights in (FILE, INDEX)):
        if (folder / "model" / "config.json").is_file():
            return str(folder / "model")
        if (folder / "checkpoints").is_dir():
            raise FileNotFoundError(f"{name} holds a training run that is not finished: repeat its command")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name} holds no checkpoint: it has no config.json; give a folder with {_MEANT}")
    return str(folder)


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turn what transformers says of a checkpoint that it cannot get into one line that names the remedy, an OSError."""
    try:
        yield
    except GatedRepoError as error:
        raise OSError(f"{name} is gated: ask for access on its hub page, then log in (`hf auth login`)") from error
    except OSError as error:
        if not Path(name).is_dir() and ("connect" in str(error) or "offline" in str(error)):
            raise _unreachable(name) from error
        raise


def ask_hub(name: str, revision: str | None) -> None:
    """Raise OSError at once for a checkpoint not in the cache if no hub is reached; transformers asks for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if try_to_load_from_cache(name, "config.json", revision=revision) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except HfHubHTTPError:  # an answer: transformers says what it means
        return
    except Exception as error:  # of the library that huggingface_hub happens to call
        raise _unreachable(name) from error


def _unreachable(name: str) -> OSError:
    return OSError(
        f"{name} is neither a folder here nor in the local cache, and the hub cannot be reached: "
        "check the name and the network, or give a local folder"
    )


def files_of(name: str, origin: Mapping[str, Any]) -> tuple[list[Path], set[str]]:
    """Find the files and an index's tensors; later files go before earlier. Raises FileNotFoundError or OSError."""
    from transformers.utils import cached_file

    def find(file: str) -> Path | None:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **origin)
        return None if found is None else Path(str(found))

    if (single := find(FILE)) is not None:
        return [single], set()
    if (index := find(INDEX)) is None:
        raise FileNotFoundError(f"{name} has no {FILE}: only safetensors files are loaded; use save_pretrained()")
    listed = listed_files(index)
    paths = {file: find(file) for file in sorted({*listed.values()})}
    for file, path in paths.items():
        if path is None:
            raise FileNotFoundError(f"{name} has no {file}, which its {INDEX} names: copy the file there")
    return [path for path in paths.values() if path is not None], {*listed}


def listed_files(index: Path) -> dict[str, str]:
    """Read the file of every tensor that an index lists. OSError for one that cannot be read."""
    try:
        said = json.loads(index.read_text(encoding="utf-8"))
        listed = {str(tensor): str(file) for tensor, file in said["weight_map"].items()}
        whole = isinstance(said["metadata"], dict) and bool(listed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{index} is damaged ({type(error).__name__}: {error}): {_AGAIN}") from error
    if not whole:
        raise OSError(f"{index} is damaged (it lists nothing): {_AGAIN}")
    for file in sorted(listed.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise OSError(f"{index} names {file}, which is not a safetensors file beside it: {_AGAIN}")
    return listed
