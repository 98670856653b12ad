"""LayerSkip self-speculative decoding: one model drafts with its first layers and verifies with the rest."""

from selfspec.generator import GenerationResult, SelfSpecGenerator, Streamer
from selfspec.sampling import NonFiniteLogitsError
from selfspec.stats import GenerationStats

__version__ = "0.1.0"

__all__ = [
    "GenerationResult",
    "GenerationStats",
    "NonFiniteLogitsError",
    "SelfSpecGenerator",
    "Streamer",
    "__version__",
]
