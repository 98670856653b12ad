"""LayerSkip self-speculative decoding: one model drafts with its first layers and verifies with the rest."""

from selfspec.batch import BatchError
from selfspec.engine import Engine, GenerationResult, Progress
from selfspec.generator import SelfSpecGenerator, Streamer
from selfspec.integrations.custom_generate import custom_generate
from selfspec.sampling import NonFiniteLogitsError
from selfspec.stats import GenerationStats

__version__ = "0.1.0"

__all__ = [
    "BatchError",
    "Engine",
    "GenerationResult",
    "GenerationStats",
    "NonFiniteLogitsError",
    "Progress",
    "SelfSpecGenerator",
    "Streamer",
    "__version__",
    "custom_generate",
]
