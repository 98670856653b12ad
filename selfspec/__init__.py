"""LayerSkip self-speculative decoding: one model drafts with its first layers and verifies with the rest."""

from selfspec.batch import BatchError
from selfspec.engine.engine import Engine
from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.sampling import NonFiniteLogitsError
from selfspec.engine.stats import GenerationStats
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
