"""Exits of frozen models: training their adapters."""
