"""A checkpoint's configuration without transformers' class of it, whose import takes a second.

transformers' class adds defaults to what a file says, and interprets some fields. Where a file says everything plainly, the
values that loading and decoding read are known without the class: they are the attributes of a `PlainConfig`. As soon as
it is asked for anything else, it becomes an object of transformers' class, in place.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from typing import Any

import torch

from layerskip_models.checkpoints.typed_fields import is_int, is_number
from layerskip_models.families.family import Family, foreign_config
from layerskip_models.fork_safe import fork_safe

COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "skip_loop_final_norm")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SOMETIMES = frozenset(
    {
        "attention_bias", "compression_config", "head_dim", "is_causal", "layer_types", "mlp_bias",
        "no_rope_layers", "original_max_position_embeddings", "partial_rotary_factor", "per_layer_config",
        "quantization_config", "sliding_window", "transformers_weights",
    }
)  # fmt: skip
"""Fields that only some families or files have. One that is set and not among a family's is for transformers' class."""
_DTYPES = {None: None} | {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
_lock = fork_safe(threading.RLock())


def plain_config(family: Family, said: Mapping[str, Any], name: str = "") -> Any:
    """Return the configuration that a file describes; None where transformers' class must read it.

    said: the fields of config.json. name: the checkpoint's.
    """
    plain, code = family.plain, frozenset() if family.foreign else {"auto_map"}
    if plain is None or any(said.get(field) is not None for field in (_SOMETIMES - plain.keys()) | code):
        return None
    values = {field: said.get(field, plain.get(field)) for field in (*plain, *COUNTS, "rms_norm_eps")}
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
    dtype = said.get("dtype") or said.get("torch_dtype")
    counted = all(is_int(values[field]) and values[field] > 0 for field in COUNTS)
    if not counted or not isinstance(rope, dict) or not isinstance(dtype, (str, type(None))):
        return None
    rope = {"rope_theta": said.get("rope_theta", 10000.0), "rope_type": "default", **rope}
    every, window = ["full_attention"] * values["num_hidden_layers"], values.get("sliding_window")
    if values.get("head_dim", 1) is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if "layer_types" in values:  # the window is that of the others
        values |= {"layer_types": values["layer_types"] or every, "sliding_window": None}
    tokens = [values[field] for field in _TOKENS if values[field] is not None]
    fits = (
        isinstance(values["rms_norm_eps"], float)
        and values["hidden_act"] == "silu"
        and values["hidden_size"] % values["num_attention_heads"] == 0
        and all(isinstance(values.get(field, False), bool) for field in _FLAGS)
        and all(is_int(one) for ids in tokens for one in (ids if isinstance(ids, list) else [ids]))
        and is_int(values.get("head_dim", 1))
        and isinstance(values.get("loop_loss_weights") or (), (list, tuple))
        and (window is None or is_int(window))
        and (values.get("layer_types", every) == every and not said.get("use_sliding_window"))
        and (len(rope) == 2 and rope["rope_type"] == "default" and is_number(rope["rope_theta"]))
        and dtype in _DTYPES
    )
    if not fits:
        return None
    values |= {"model_type": family.model_type, "name_or_path": name, "rope_parameters": rope, "dtype": _DTYPES[dtype]}
    if family.foreign:  # there is no class to interpret these
        said = {field: said[field] for field in said.keys() - {"auto_map", "rope_scaling", "rope_theta"}}
    return PlainConfig(family, {**said, "name_or_path": name}, values)


def known_config(family: Family, said: Mapping[str, Any], name: str = "") -> Any:
    """Return the same; of a family that transformers does not know, UnreadFieldError where the file says anything else."""
    config = plain_config(family, said, name)
    if config is None and family.foreign:
        others = {field: {key: said[key] for key in said.keys() - {field}} for field in sorted(said)}
        wrong = next((field for field in others if plain_config(family, others[field]) is not None), None)
        what = "fields that are missing or wrong" if wrong is None else f"{wrong} = {said[wrong]!r}"
        raise UnreadFieldError(f"has {what} in its configuration, which is not read of {family.model_type!r} models")
    for field, value in family.fixed.items():
        if said.get(field) not in (None, [], "", value):
            raise UnreadFieldError(f"has {field} = {said[field]!r} in its configuration, and only {value} is run")
    return config


class UnreadFieldError(ValueError):
    """A configuration says what is not run. The message begins with what it has."""


class PlainConfig:
    """The fields of a configuration that are read before transformers' class of it is needed."""

    def __init__(self, family: Family, said: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.__dict__.update(values, _plain=((family.foreign, f"{family.architecture}Config", family.model_type), said))

    def __getattr__(self, name: str) -> Any:
        if name in _SOMETIMES or name.startswith("__") or name == "_plain":
            raise AttributeError(name)
        return getattr(become_whole(self), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainConfig:
        with _lock:  # another thread may be making it whole
            made = object.__new__(type(self))
            vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __repr__(self) -> str:
        return repr(become_whole(self))

    def __eq__(self, other: object) -> bool:
        return bool(become_whole(self) == other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return become_whole(self).__reduce_ex__(protocol)  # pickle compares classes

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Show `isinstance` transformers' class, whose fields these are."""
        with _lock:
            return _class_of(self._plain[0]) if "_plain" in vars(self) else type(self)


def _class_of(kind: tuple[bool, str, str]) -> Any:
    import transformers

    foreign, name, model_type = kind
    return foreign_config(name, model_type) if foreign else getattr(transformers, name)


def become_whole(config: Any) -> Any:
    """Make an object of transformers' class of a `PlainConfig`, in place, with what was written to it; return it."""
    with _lock:
        own = vars(config)
        if "_plain" in own:
            kind, said = own["_plain"]
            whole = _class_of(kind).from_dict({**said})
            for field in own.keys() - {"_plain"}:
                if getattr(whole, field, None) != own[field]:
                    setattr(whole, field, own[field])
            own.update(vars(whole))
            vars(object)["__class__"].__set__(config, type(whole))
            for field in own.keys() - vars(whole).keys():
                del own[field]
    return config
