"""Adapters at the exits of a frozen model: what drafts see, and verification never does."""

LOW_RANK, STEERED = "low_rank", "steered"
FORMS = (LOW_RANK, STEERED)
"""The forms of adapters that drafts are made with, as a folder of adapters names them."""
STEERING_SIZE = 64
"""The width of g (`exits.adapter`) where nobody names another."""
FOLDER = "exits"
"""The folder beside a checkpoint's weights that holds its adapters."""
