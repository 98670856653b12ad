"""SpecBound (Wen and Feng 2026) by replay: each drafted token leaves the model where it is sure enough."""
