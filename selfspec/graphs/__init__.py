"""Captured rounds: the passes of a round run as CUDA graphs."""
