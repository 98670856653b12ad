"""LayerSkip checkpoints: loading them, running ranges of their layers, training them."""

from layerskip_models.checkpoints.conversion import from_transformers
from layerskip_models.checkpoints.loading import DEMO_PATH, load_demo, load_model, load_tokenizer
from layerskip_models.checkpoints.supported import LAYERSKIP_CHECKPOINTS
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
