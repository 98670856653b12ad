"""One thing in a checkpoint's files is changed: it is refused in one line, or decoded as what the files say.

Checkpoints of every format that is read are built small. Refused means a ValueError or OSError of one line. Else the logits
must be transformers' on the same files, or those of the model that the files were made from; exit adapters and pre-verifiers
must not change the text. A change of numbers that only transformers could check is let through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from layerskip_models import load_model
from layerskip_models.families import family_of, find_family
from layerskip_models.kv_cache import KVCache
from selfspec import SelfSpecGenerator
from small_checkpoints import FORMATS, VOCAB_SIZE, Built

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of files that nobody should have
TEXT = [(7 * i * i + 3) % VOCAB_SIZE for i in range(24)]
ALWAYS = ("safetensors, sharded", "gguf Q4_0", "adapters")
SEEDS = 12  # of the slow run, for each format
DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn)


def other_value(value: Any, random: Random) -> Any:
    others: list[Any] = [None, -1, 0, 1, 0.5, float("nan"), "x", "", [], {}, 10**12]
    if isinstance(value, bool):
        others += [not value] * 8
    elif isinstance(value, (int, float)):
        others += [value + 1, value - 1, 2 * value, value / 2, float(value), str(value)] * 2
    elif isinstance(value, str):
        others += [f"{value}_other", value.upper(), value[:-1]] * 4
    elif isinstance(value, list) and value:
        others += [value[::-1], value[:-1], value + value[:1]] * 4
    return random.choice(others)


def change_field(path: Path, random: Random) -> tuple[str, bool]:
    """Change a field, however deep; `test_config_fields` adds some.

    Returns what was done and whether numbers may be others, as the changes below do.
    """

    def places(value: Any) -> Iterator[tuple[Any, Any]]:
        for key, inner in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
            yield value, key
            if isinstance(inner, (dict, list)):
                yield from places(inner)

    document = json.loads(path.read_text())
    holder, key = random.choice([*places(document)])
    if random.random() < 0.25:
        del holder[key]
        key = f"without {key}"
    else:
        holder[key] = other_value(holder[key], random)
    path.write_text(json.dumps(document))
    return f"{key} of {holder}", False


def change_tensor(path: Path, random: Random) -> tuple[str, bool]:
    tensors = load_file(path)
    name, other = random.choice(sorted(tensors)), random.choice(sorted(tensors))
    value, changes = tensors[name].clone(), False
    kind = random.choice(["left out", "renamed", "added", "swapped", "type", "shape", "NaN"])
    if kind == "left out":
        del tensors[name]
    elif kind == "renamed":
        new = random.choice([f"{name}_", name.replace(".0.", ".1."), name.upper(), f"model.{name}"])
        tensors[new] = tensors.pop(name)
        changes = new in tensors
    elif kind == "added":
        new = f"{name.rpartition('.')[0]}.{random.choice(['bias', 'weight_scale', 'g_idx', 'lora_A.weight'])}"
        changes = new in tensors  # then it is another one's
        tensors[new] = torch.rand(value.shape[:1] or (1,)) + 1.0
    elif kind == "swapped":
        tensors[name], tensors[other] = tensors[other].clone(), value
        changes = True
    elif kind == "type":
        tensors[name] = value.to(random.choice([one for one in DTYPES if one != value.dtype]))
        changes = not torch.equal(tensors[name].double(), value.double())
    elif kind == "shape":
        shapes = [value.reshape(-1), value[:-1] if value.dim() else value, value.unsqueeze(0)]
        if value.dim() == 2:
            shapes += [value.t(), value[:, :-1], torch.cat((value, value[:1]))]
        tensors[name] = random.choice(shapes).contiguous()
        changes = tensors[name].shape == value.shape  # a transposed square one is another matrix, and looks right
    elif value.numel():
        value.view(-1)[random.randrange(value.numel())] = float("nan") if value.is_floating_point() else 3
        tensors[name], changes = value, True
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"})
    return f"{name} {kind} ({other})", changes


def change_bytes(path: Path, random: Random) -> tuple[str, bool]:
    """Cut a file, or change one bit of it, mostly at its beginning."""
    data = bytearray(path.read_bytes())
    at = random.randrange(min(len(data), random.choice([16, 400, 4000, len(data)])))
    header = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    kind = random.choice(["cut", "flipped", "flipped"])
    if kind == "cut":
        del data[at:]
    else:
        data[at] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    numbers = path.suffix == ".gguf" or at >= header or header > len(data)
    return f"{kind} at {at}", kind == "flipped" and numbers


def mutate(place: Path, random: Random) -> tuple[str, bool]:
    """Change one file of a folder. `test_loading` has files that are missing, and indices that say what is not so."""
    weights = sorted(place.glob("*.safetensors"))
    settings = [path for path in sorted(place.glob("*.json")) if "generation" not in path.name]
    change, paths = random.choice(
        [*[(change_field, settings)] * 2, *[(change_tensor, weights)] * 3, (change_bytes, weights)]
    )
    path = random.choice(paths)
    about, changes = change(path, random)
    return f"{path.name}: {about}", changes


def logits_of(built: Built) -> Tensor:
    place = built.changed if built.changed.suffix == ".gguf" else built.folder
    load_model(place, device="cpu")  # in 4 and 8 bits, where the file has these
    lean = load_model(place, dtype="float32", device="cpu", layout="plain")
    with torch.inference_mode():
        hidden = lean.run_layers(lean.embed(torch.tensor(TEXT)), 0, lean.num_layers, KVCache(lean, len(TEXT)))
        return lean.logits(hidden)


def text_of(built: Built) -> list[int]:
    """Drafted with the changed adapters or the changed pre-verifier."""
    adapted = built.changed.name == "exits"
    lean = load_model(built.folder, device="cpu", layout="plain", exits=built.changed if adapted else None)
    policy = "ls:1-3" if adapted else f"pacer:{built.changed},b=2"
    return SelfSpecGenerator(lean).generate(TEXT[:8], max_new_tokens=12, policy=policy).new_tokens


def expected_text(built: Built) -> list[int]:
    built.meant.config._attn_implementation = "eager"
    text = TEXT[:8]
    for _ in range(12):
        with torch.no_grad():
            text = [*text, int(built.meant(torch.tensor([text]), use_cache=False).logits[0, -1].argmax())]
    return text[8:]


def expected_logits(name: str, built: Built) -> Tensor:
    """Ask transformers, which raises any exception for files that it refuses."""
    model: Any = built.meant
    if name.startswith("safetensors"):
        model = AutoModelForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    else:
        config = model.config
        if find_family(config) is not None:
            model = family_of(config).model(config).eval()
            model.load_state_dict(built.meant.state_dict(), strict=False)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TEXT]), use_cache=False).logits[0].float()
        return logits


def same_logits(found: Tensor, expected: Tensor) -> bool:
    """Whether logits are the same up to rounding. A change may bring NaN, or nothing but zeros."""
    largest = float(expected.nan_to_num(0, 0, 0).abs().max())
    same_shape = found.shape == expected.shape
    return same_shape and torch.allclose(found, expected, rtol=0, atol=0.02 * largest, equal_nan=True)


def outcome(name: str, seed: int, folder: Path) -> tuple[str, str]:
    """(what was changed; "refused", "equal", "changed" or "WRONG"). name: of a format. folder: an empty one."""
    random = Random(f"{name} {seed}")
    built = FORMATS[name](folder, seed)
    # `test_gguf_checkpoint` changes keys and tensors of GGUF files.
    about, changes = (change_bytes if name.startswith("gguf") else mutate)(built.changed, random)
    drafts = built.changed.name in ("exits", "pacer")
    try:
        found = text_of(built) if drafts else logits_of(built)
    except (ValueError, OSError) as error:
        return about, "refused" if "\n" not in str(error) else f"WRONG: an error of several lines: {error}"
    if isinstance(found, list):
        return about, "equal" if found == expected_text(built) else "WRONG: another text"
    try:
        expected = expected_logits(name, built)
    except Exception:  # of any kind, from inside transformers
        return about, "changed" if changes else "only transformers refuses it"
    if same_logits(found, expected):
        return about, "equal"
    exact = name.startswith("safetensors")  # there transformers has read the same files
    return about, "changed" if changes and not exact else "WRONG: other logits"


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if name in ALWAYS and seed == 0 else pytest.mark.slow)
        for name in FORMATS
        for seed in range(SEEDS)
    ],
)
def test_one_change(name: str, seed: int, tmp_path: Path) -> None:
    about, found = outcome(name, seed, tmp_path)
    assert not found.startswith("WRONG"), f"{about}: {found}"
