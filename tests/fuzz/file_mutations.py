"""One change of a checkpoint's files at a time: fields, tensors, bytes, names. Each is drawn at random."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.float8_e4m3fn,
)  # fmt: skip
_FIELDS: dict[str, tuple[Any, ...]] = {  # that a file may have and the built ones lack
    "is_causal": (False,),
    "partial_rotary_factor": (0.5,),
    "rope_scaling": (
        {"type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"type": "yarn"},
        [1],
        "linear",
    ),
    "layer_types": (["sliding_attention", "full_attention"], ["full_attention"]),
    "sliding_window": (3, 0, "3"),
    "attention_bias": (True,),
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, {"quant_method": "awq"}, [], 3),
    "transformers_weights": ("other.safetensors",),
    "logit_scale": (0.5,),
    "num_experts": (4,),
}
_MORE = ("bias", "weight_scale", "g_idx", "weight_zero_point", "input_scale", "lora_A.weight")
Change = tuple[str, bool]
"""What was done, and whether numbers of the model may be others for it."""


def mutate(place: Path, random: Random) -> Change:
    """Change one file at random. place: a folder."""
    kinds: list[Callable[[Path, Random], Change]] = [_field, _field, _tensor, _tensor, _tensor, _bytes, _file]
    if [*place.glob("*.index.json")]:
        kinds += [_index, _index]
    return random.choice(kinds)(place, random)


def other_values(value: Any, random: Random) -> Any:
    """A value that a field might have instead."""
    simple: list[Any] = [None, True, -1, 0, 1, 2, 0.5, float("nan"), "x", "", [], {}, [1, 2], 10**12]
    if isinstance(value, bool):
        simple += [not value] * 8
    elif isinstance(value, (int, float)):
        simple += [value + 1, value - 1, 2 * value, value / 2, float(value), str(value)] * 2
    elif isinstance(value, str):
        simple += [f"{value}_other", value.upper(), value[:-1]] * 4
    elif isinstance(value, list) and value:
        simple += [value[::-1], value[:-1], value + value[:1]] * 4
    return random.choice(simple)


def _json_files(place: Path) -> list[Path]:
    return [path for path in sorted(place.glob("*.json")) if "generation" not in path.name and "index" not in path.name]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


def _field(place: Path, random: Random) -> Change:
    path = random.choice(_json_files(place))
    document = json.loads(path.read_text())
    if path.name == "config.json" and random.random() < 0.25:
        name = random.choice([*_FIELDS])
        document[name] = random.choice(_FIELDS[name])
        about = f"{name} = {document[name]!r}"
    else:
        *way, last = random.choice([*_places(document)])
        inner = document
        for key in way:
            inner = inner[key]
        if random.random() < 0.25:
            del inner[last]
            about = f"{[*way, last]} left out"
        else:
            inner[last] = other_values(inner[last], random)
            about = f"{[*way, last]} = {inner[last]!r}"
    path.write_text(json.dumps(document))
    return f"{path.name}: {about}", False


def _weights(place: Path, random: Random) -> Path:
    return random.choice(sorted(place.glob("*.safetensors")))


def _tensor(place: Path, random: Random) -> Change:
    path = _weights(place, random)
    tensors = load_file(path)
    name = random.choice(sorted(tensors))
    value = tensors[name].clone()
    about, changes = "", False
    kind = random.choice(["left out", "renamed", "added", "swapped", "dtype", "shape", "NaN", "infinite", "numbers"])
    if kind == "left out":
        del tensors[name]
    elif kind == "renamed":
        new = random.choice(
            [f"{name}_", name.replace(".0.", ".1."), name.replace("weight", "bias"), name.upper(), f"model.{name}"]
        )
        tensors[new] = tensors.pop(name)
        about, changes = f" to {new}", new in tensors
    elif kind == "added":
        module, _, _ = name.rpartition(".")
        new = f"{module}.{random.choice(_MORE)}"
        changes = new in tensors  # then it is another one's
        tensors[new] = torch.rand(value.shape[:1] or (1,)) + 1.0
        about = f": {new}"
    elif kind == "swapped":
        other = random.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other].clone(), value
        about, changes = f" with {other}", True
    elif kind == "dtype":
        dtype = random.choice([one for one in _DTYPES if one != value.dtype])
        tensors[name] = value.to(dtype)
        about, changes = f" {dtype}", not dtype.is_floating_point or dtype == torch.float8_e4m3fn
        changes = changes and torch.equal(tensors[name].double(), value.double()) is False
    elif kind == "shape":
        shapes = [value.reshape(-1), value.reshape(1, -1), value[:-1] if value.dim() else value, value.unsqueeze(0)]
        if value.dim() == 2:
            shapes += [value.t(), value[:, :-1], torch.cat((value, value[:1])), torch.cat((value, value[:, :1]), dim=1)]
        if value.numel() % 2 == 0:
            shapes.append(value.reshape(2, -1))
        tensors[name] = random.choice(shapes).contiguous()
        about = f" {[*tensors[name].shape]} instead of {[*value.shape]}"
        changes = tensors[name].shape == value.shape  # a transposed square one is another matrix, and looks right
    elif value.numel() and (kind == "numbers" or value.is_floating_point()):
        flat = value.view(-1)
        at = random.randrange(len(flat))
        flat[at] = {"NaN": float("nan"), "infinite": float("inf")}.get(kind, 3)
        tensors[name] = value
        changes = True
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"})
    return f"{path.name}: {name} {kind}{about}", changes


def _bytes(place: Path, random: Random) -> Change:
    return bytes_of(random.choice([*sorted(place.glob("*.safetensors")), *_json_files(place)]), random)


def bytes_of(path: Path, random: Random) -> Change:
    """Cut a file, or change some of its bytes, mostly those at its beginning."""
    data = bytearray(path.read_bytes())
    kind = random.choice(["cut", "flipped", "flipped", "flipped", "more", "emptied"])
    at = random.randrange(min(len(data), random.choice([16, 400, 4000, len(data)])))
    header = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else len(data)
    if kind == "cut":
        data = data[:at]
    elif kind == "emptied":
        data = bytearray()
    elif kind == "more":
        data += bytes(random.randrange(256) for _ in range(8))
    else:
        data[at] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return f"{path.name}: {kind} at {at} of {len(path.read_bytes())}", kind == "flipped" and (
        at >= header or header > len(data)
    )


def _file(place: Path, random: Random) -> Change:
    path = random.choice([*sorted(place.glob("*.safetensors")), *_json_files(place)])
    kind = random.choice(["removed", "a folder", "another beside it", "list"])
    if kind == "another beside it":
        save_file({"model.norm.weight": torch.zeros(64)}, place / "other.safetensors")
    elif kind == "list" and path.suffix == ".json":
        path.write_text("[1]")
    else:
        path.unlink()
        if kind == "a folder":
            path.mkdir()
    return f"{path.name}: {kind}", False


def _index(place: Path, random: Random) -> Change:
    (path,) = place.glob("*.index.json")
    document = json.loads(path.read_text())
    listed = document["weight_map"]
    name = random.choice([*listed])
    kind = random.choice(["elsewhere", "no such file", "outside", "left out", "a number", "no list", "all in one"])
    if kind == "elsewhere":
        listed[name] = random.choice([*listed.values()])
    elif kind in ("no such file", "outside", "a number"):
        listed[name] = {"no such file": "nothing.safetensors", "outside": "../model.safetensors", "a number": 3}[kind]
    elif kind == "left out":
        del listed[name]
    elif kind == "no list":
        document["weight_map"] = [*listed]
    else:
        document["weight_map"] = dict.fromkeys(listed, listed[name])
    path.write_text(json.dumps(document))
    return f"{path.name}: {name} {kind}", False
