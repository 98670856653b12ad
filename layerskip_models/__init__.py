"""LayerSkip checkpoints: loading them, running ranges of their layers, training them."""

from typing import TYPE_CHECKING

from layerskip_models.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from layerskip_models.checkpoints.conversion import from_transformers
    from layerskip_models.checkpoints.loading import load_demo, load_model, load_tokenizer
    from layerskip_models.checkpoints.named_models import DEMO_PATH
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
_PLACES = {
    "DEMO_PATH": "layerskip_models.checkpoints.named_models",
    "LAYERSKIP_CHECKPOINTS": "layerskip_models.checkpoints.supported",
    "LayerSkipModel": "layerskip_models.model",
    "from_transformers": "layerskip_models.checkpoints.conversion",
    "load_demo": "layerskip_models.checkpoints.loading",
    "load_model": "layerskip_models.checkpoints.loading",
    "load_tokenizer": "layerskip_models.checkpoints.loading",
}
"""The module of each name, which is imported when the name is first asked for."""

__getattr__, __dir__ = lazy_imports(__name__, _PLACES)
