"""LayerSkip checkpoints: loading them, running ranges of their layers, training them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_PLACES = {
    "DEMO_PATH": "layerskip_models.checkpoints.loading",
    "LAYERSKIP_CHECKPOINTS": "layerskip_models.checkpoints.supported",
    "LayerSkipModel": "layerskip_models.model",
    "from_transformers": "layerskip_models.checkpoints.conversion",
    "load_demo": "layerskip_models.checkpoints.loading",
    "load_model": "layerskip_models.checkpoints.loading",
    "load_tokenizer": "layerskip_models.checkpoints.loading",
}
"""The module of each name, which is imported when the name is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
