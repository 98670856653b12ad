"""Steered exits (SD2) beside unsteered ones, drafting in the engine, greedily and at temperature 1."""
