"""LayerSkip self-speculative decoding: one model drafts with its first layers and verifies with the rest."""

from typing import TYPE_CHECKING

from layerskip_models.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from selfspec.batch import BatchError
    from selfspec.engine.engine import Engine
    from selfspec.engine.results import GenerationResult, GenerationStats, StepOutput
    from selfspec.engine.sampling import NonFiniteLogitsError
    from selfspec.generator import SelfSpecGenerator, Streamer
    from selfspec.integrations.custom_generate import custom_generate

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "Engine",
    "GenerationResult",
    "GenerationStats",
    "NonFiniteLogitsError",
    "SelfSpecGenerator",
    "StepOutput",
    "Streamer",
    "__version__",
    "custom_generate",
]
_PLACES = {
    "BatchError": "selfspec.batch",
    "Engine": "selfspec.engine.engine",
    "GenerationResult": "selfspec.engine.results",
    "GenerationStats": "selfspec.engine.results",
    "NonFiniteLogitsError": "selfspec.engine.sampling",
    "SelfSpecGenerator": "selfspec.generator",
    "StepOutput": "selfspec.engine.results",
    "Streamer": "selfspec.generator",
    "custom_generate": "selfspec.integrations.custom_generate",
}
"""The module of each name, which is imported when the name is first asked for: `selfspec get` needs none of them."""

__getattr__, __dir__ = lazy_imports(__name__, _PLACES)
