"""Changes one thing in a checkpoint's files at a time: it must be refused in one line, or decoded as what the files say.

    python -m tests.fuzz.mutated_files --minutes 10 --seed 0

Checkpoints of every format that is read are built small and changed: a field, a tensor's type, shape or name, bytes, files.
Refused means a ValueError or OSError of one line. Else logits must be transformers' on the same files, or those of the
model that the files were made from; exit adapters and pre-verifiers must not change the text.
`--case FORMAT:SEED` repeats one case. Cases that transformers alone refuses are shown for a look, and fail nothing.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import signal
import sys
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import gguf_models
from layerskip_models import load_model
from layerskip_models.checkpoints.quantised import unquantised
from layerskip_models.families import family_of, find_family
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from small_checkpoints import FORMATS, VOCAB_SIZE, Built
from tests.fuzz.file_mutations import bytes_of, mutate, other_values

TEXT = [(7 * i * i + 3) % VOCAB_SIZE for i in range(24)]
PATIENCE_SECONDS = 60
_BUILDS = 12  # so many seeds of checkpoints: building takes longer than reading
_READ = {  # of GGUF metadata, what transformers' configurations call it
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
}


def outcome(name: str, seed: int, folder: Path) -> tuple[str, str]:
    """(what was changed, "refused", "equal", "changed" for other numbers, or what is wrong, beginning with "WRONG").

    name: of a format. folder: an empty one, for the files.
    """
    random = Random(f"{name} {seed}")
    built = _copy_of(name, random.randrange(_BUILDS), folder)
    if name.startswith("gguf"):
        about, changes = _change_gguf(built, name.removeprefix("gguf "), random)
    else:
        about, changes = mutate(built.changed, random)
    with _patience():
        try:
            found = _text(built) if built.changed.name in ("exits", "pacer") else _logits(built)
        except (ValueError, OSError) as error:
            return about, "refused" if "\n" not in str(error) else f"WRONG: an error of several lines: {error}"
        except Exception as error:  # of any kind
            return about, f"WRONG: {type(error).__name__}: {error}"
    if isinstance(found, list):
        built.meant.config._attn_implementation = "eager"
        return about, "equal" if found == _reference_text(built) else "WRONG: another text"
    try:
        expected = _expected(name, built)
    except Exception as error:  # of any kind, from inside transformers
        return about, "changed" if changes else f"alone: only transformers refuses it ({type(error).__name__}: {error})"
    if same_logits(found, expected):
        return about, "equal"
    exact = name.startswith("safetensors")  # there transformers has read the same files
    return about, "changed" if changes and not exact else "WRONG: other logits"


def same_logits(found: Tensor, expected: Tensor) -> bool:
    """Whether logits are the same up to rounding. A change may bring NaN, or nothing but zeros."""
    if found.shape != expected.shape:
        return False
    largest = float(expected.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(found, expected, rtol=0, atol=0.02 * largest, equal_nan=True)


_built: dict[tuple[str, int], Built] = {}
_kept = TemporaryDirectory()


def _copy_of(name: str, seed: int, folder: Path) -> Built:
    if (name, seed) not in _built:
        own = Path(_kept.name) / f"{len(_built)}"
        own.mkdir()
        _built[name, seed] = FORMATS[name](own, seed)
    first = _built[name, seed]
    shutil.copytree(first.folder, folder, dirs_exist_ok=True)
    return Built(folder, folder / first.changed.relative_to(first.folder), copy.deepcopy(first.meant))


def _change_gguf(built: Built, own_kind: str, random: Random) -> tuple[str, bool]:
    """Metadata, a tensor, or bytes. own_kind: of the file's matrices."""
    path, kind = built.changed, random.choice(["key", "key", "tensor", "bytes"])
    if kind == "bytes":
        about, _ = bytes_of(path, random)
        return about, "flipped" in about
    config: Any = built.meant.config
    keys, tensors = gguf_models.metadata(config), gguf_models.tensors(built.meant, own_kind)
    changes = False
    if kind == "key":
        more = ["expert_count", "attention.sliding_window", "rope.scaling.type", "rope.scaling.factor", "logit_scale"]
        more += ["attention.scale", "tokenizer.ggml.eos_token_id", "something.else"]
        name = random.choice([*keys, *more])
        value = other_values(keys.get(name, 1), random)
        if random.random() < 0.2:
            keys.pop(name, None)
            about = f"{name} left out"
        else:
            keys[name] = value
            about = f"{name} = {value!r}"
        field = _READ.get(name)
        if field is not None and isinstance(keys.get(name), (int, float)):
            with suppress(Exception):  # transformers checks what a configuration is given
                setattr(config, field, keys[name] or None)
        changes = name in ("rope.freq_base", "rope.scaling.factor", "rope.scaling.type", *_READ)
        # A Phi-3 may rotate part of a head; other families are refused then.
        changes = changes or (name == "rope.dimension_count" and config.model_type == "phi3")
    else:
        name = random.choice([*tensors])
        data, own = tensors[name]
        how = random.choice(["left out", "renamed", "added", "cut", "NaN"])
        if how == "left out":
            del tensors[name]
        elif how == "renamed":
            tensors[f"{name}x"] = tensors.pop(name)
        elif how == "added":
            tensors[name.replace("weight", "bias2")] = (data, own)
        elif how == "cut":
            tensors[name] = (data[:-1].copy(), own)
        else:
            changed = data.copy()
            changed.view("uint8").reshape(-1)[:4] = 255
            tensors[name] = (changed, own)
        tied = name == "output.weight" and how == "left out"  # then the embedding is the head
        about, changes = f"{name} {how}", how == "NaN" or tied
    try:
        gguf_models.write(path, config.model_type, keys, tensors)
    except Exception:  # of any kind: the writer refuses it
        path.write_bytes(b"")
        return f"{about}: which cannot be written", False
    return about, changes


def _logits(built: Built) -> Tensor:
    place = built.changed if built.changed.suffix == ".gguf" else built.folder
    load_model(place, device="cpu")  # in 4 and 8 bits, where the file has these
    lean = load_model(place, dtype="float32", device="cpu", layout="plain")
    with torch.inference_mode():
        hidden = lean.run_layers(lean.embed(torch.tensor(TEXT)), 0, lean.num_layers, KVCache(lean, len(TEXT)))
        return lean.logits(hidden)


def _text(built: Built) -> list[int]:
    adapted = built.changed.name == "exits"
    lean = load_model(built.folder, device="cpu", layout="plain", exits=built.changed if adapted else None)
    policy = "ls:1-3" if adapted else f"pacer:{built.changed},b=2"
    return SelfSpecGenerator(lean).generate(TEXT[:8], max_new_tokens=12, policy=policy).new_tokens


def _reference_text(built: Built) -> list[int]:
    text = TEXT[:8]
    for _ in range(12):
        with torch.no_grad():
            text = [*text, int(built.meant(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())]
    return text[8:]


def _expected(name: str, built: Built) -> Tensor:
    model: Any = built.meant
    if name.startswith("safetensors"):
        model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    else:
        config = built.meant.config
        if not name.startswith("gguf"):
            config = unquantised(AutoConfig.from_pretrained(built.folder))
            # A head in the file that differs from the embedding is not tied, whatever the configuration says.
            config.tie_word_embeddings = built.meant.config.tie_word_embeddings
        if find_family(config) is not None:
            model = family_of(config).model(config).eval()
            model.load_state_dict(built.meant.state_dict(), strict=False)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TEXT]), use_cache=False).logits[0].float()
        return logits


class _patience:
    """Within it a hang ends with TimeoutError, which is told as wrong."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._late)
        signal.alarm(PATIENCE_SECONDS)

    def __exit__(self, *error: object) -> None:
        signal.alarm(0)

    @staticmethod
    def _late(*arguments: object) -> None:
        raise RuntimeError(f"no answer after {PATIENCE_SECONDS} s")


def try_one(name: str, seed: int) -> tuple[str, str]:
    """`outcome` in a folder of its own, without transformers' warnings."""
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(name, seed, Path(folder))


def main(arguments: list[str] | None = None) -> int:
    """Try changes until the time is over. Returns 1 if one was read wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.mutated_files", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--case", help="repeat one case that was reported, as FORMAT:SEED")
    options = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.case is not None:
        name, _, seed = options.case.rpartition(":")
        about, found = try_one(name, int(seed))
        print(f"{about}: {found}")
        return int(found.startswith("WRONG"))
    random, ends, counts = Random(options.seed), monotonic() + 60 * options.minutes, Counter[str]()
    shown = monotonic()
    while monotonic() < ends:
        name, seed = random.choice([*FORMATS]), random.randrange(10**9)
        about, found = try_one(name, seed)
        counts[found.partition(":")[0]] += 1
        if found.startswith(("WRONG", "alone")):
            print(f"{name}:{seed} {about}: {' '.join(found.split())}", flush=True)
        if monotonic() - shown > 30:
            shown = monotonic()
            print(_summary(counts), file=sys.stderr, flush=True)
    print(_summary(counts))
    return 1 if counts["WRONG"] else 0


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
