"""Trials of exactness: generated cases against transformers, and many calls at once for a long time."""
