"""What a family of models is to the loader: a description in names and small functions, no code that runs a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SCALED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on how long the text is."""


class Biased(NamedTuple):
    """Which linears of a layer have biases: queries, keys and values together, attention's output, those of the MLP."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


def no_biases(config: Any) -> Biased:
    return Biased()


def attention_biases(config: Any) -> Biased:
    """As a configuration says that has a say about attention only."""
    return Biased(qkv=config.attention_bias, output=config.attention_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers. The defaults are Llama's, so a family says what it does otherwise.

    title: the models it covers, in a user's words.
    model_type: as config.json names it. architecture: what the names of transformers' classes begin with. The classes are
        imported when they are asked for: that of the model takes a second, and reading a checkpoint does without it.
    ropes: kinds of rotary embedding that can be run.
    qkv, gate_up: linears of `self_attn` and `mlp` whose outputs, one after the other, are queries, keys and values, and gate
        and up.
    input_norm, post_attention_norm: norms of a layer before attention and before the MLP; None where there is none.
    output_norm, down_norm: norms of what attention and the MLP add, before it is added.
    query_norm, key_norm: norms in `self_attn`, of every head by itself or of all heads of a row together, as they are wide.
    norms_all_heads: whether they are as wide as all heads together.
    biased: of a config, which linears of transformers' model have biases. A model in memory may have others.
    sliding_window: of (config, layer index), how many positions a row attends to, its own among them; None for all.
    rotates: of (config, layer index), whether queries and keys get the rotary embedding.
    rotates_part: whether a configuration may rotate only the first numbers of each head.
    loops: of a config, how often the layers are run. set_loops: of looped models, the fields that say so.
    loop_norm: of a config, whether the last norm is between two loops, too.
    max_positions: of a config, the longest text that can be run as transformers would.
    plain: fields that the engine reads of a `PlainConfig`, with transformers' defaults, beside those that every configuration
        must have; None if transformers' class is to read all configurations.
    foreign: whether transformers has no classes of it, so that every configuration must be plain. No code is run that a
        checkpoint brings. fixed: then, fields that change what is computed, with the only value that is read.
    gate: a linear from hidden states to one number that a checkpoint may hold, and that nothing here computes with.
    """

    title: str
    model_type: str
    architecture: str
    ropes: tuple[str, ...] = SCALED_ROPES
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    input_norm: str | None = "input_layernorm"
    post_attention_norm: str | None = "post_attention_layernorm"
    output_norm: str | None = None
    down_norm: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    norms_all_heads: bool = False
    biased: Callable[[Any], Biased] = lambda config: Biased(
        config.attention_bias, config.attention_bias, config.mlp_bias
    )
    sliding_window: Callable[[Any, int], int | None] = lambda config, layer: None
    rotates: Callable[[Any, int], bool] = lambda config, layer: True
    rotates_part: bool = False
    max_positions: Callable[[Any], int] = lambda config: config.max_position_embeddings
    loops: Callable[[Any], int] = lambda config: 1
    set_loops: Callable[[int], Mapping[str, Any]] | None = None
    loop_norm: Callable[[Any], bool] = lambda config: False
    plain: Mapping[str, Any] | None = None
    foreign: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    gate: str | None = None

    @property
    def config(self) -> type[PreTrainedConfig]:
        """transformers' class of the configuration; of a foreign family one that takes any fields."""
        if self.foreign:
            return foreign_config(f"{self.architecture}Config", self.model_type)
        found: type[PreTrainedConfig] = getattr(import_module("transformers"), f"{self.architecture}Config")
        return found

    @property
    def model_name(self) -> str:
        """The name of transformers' class of the model."""
        return f"{self.architecture}ForCausalLM"

    @property
    def model(self) -> type[PreTrainedModel]:
        """transformers' class of the model. ValueError if it has none."""
        if self.foreign:
            raise ValueError(f"transformers has no {self.model_name}: only load_model() reads it, on one device")
        found: type[PreTrainedModel] = getattr(import_module("transformers"), self.model_name)
        return found

    def has_built(self, model: Any) -> bool:
        """Return whether this is one of its models. transformers' class is only imported where the name is the same."""
        named = any(base.__name__ == self.model_name for base in model.__class__.__mro__)
        return named and not self.foreign and isinstance(model, self.model)


@cache
def foreign_config(name: str, model_type: str) -> type[PreTrainedConfig]:
    """Make a class of configurations for a family that transformers does not know."""
    return type(name, (import_module("transformers").PreTrainedConfig,), {"model_type": model_type})


def listed_windows(config: Any, layer: int) -> int | None:
    """Return the sliding window of configurations that list a type for every layer."""
    return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
