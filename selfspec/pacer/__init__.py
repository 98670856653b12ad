"""Pacer's pre-verifier, trained for a checkpoint: network, inference, examples, labels, tuning, fitting."""

OURS, PAPER = "ours", "paper"
"""Designs of the network, and how it is trained and used: ours, and as Pacer was published."""
