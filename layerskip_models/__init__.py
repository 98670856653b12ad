"""LayerSkip checkpoints of the Llama family: loading them, running ranges of their layers, training them."""

from layerskip_models.loading import (
    DEMO_PATH,
    LAYERSKIP_CHECKPOINTS,
    from_transformers,
    load_demo,
    load_model,
    load_tokenizer,
)
from layerskip_models.model import LayerSkipModel

__all__ = [
    "DEMO_PATH",
    "LAYERSKIP_CHECKPOINTS",
    "LayerSkipModel",
    "from_transformers",
    "load_demo",
    "load_model",
    "load_tokenizer",
]
