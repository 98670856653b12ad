"""Rows through the model as captured CUDA graphs."""
