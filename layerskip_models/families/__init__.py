"""Supported model families, each described by how its layers differ from Llama's.

To add a family whose layers have the same parts, describe it in `described` and add it to the list below.
tests/models/test_families.py then compares small random models of it with transformers. `draw_config` in
tests/helpers/fuzz_models.py makes their configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layerskip_models.families.described import LLAMA, MISTRAL, NANBEIGE, OLMO2, OURO, PHI3, QWEN2, QWEN3, SMOLLM3
from layerskip_models.families.family import Family
from layerskip_models.families.plain_config import PlainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, SMOLLM3, OURO, NANBEIGE)}
)
"""By model_type."""
IN_TRANSFORMERS: Mapping[str, Family] = MappingProxyType(
    {kind: family for kind, family in FAMILIES.items() if not family.foreign}
)
"""Those of which transformers has classes."""


def find_family(config: object) -> Family | None:
    """Find the family of a configuration; None for one that is not supported."""
    family = FAMILIES.get(getattr(config, "model_type", ""))
    known = family is not None and (type(config) is PlainConfig or isinstance(config, family.config))
    return family if known else None


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a configuration that `checkpoints.supported` has accepted."""
    family = find_family(config)
    assert family is not None, config.model_type
    return family


def head_dim_of(config: Any) -> int:
    """Numbers of a head: configurations of some families leave it out."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
