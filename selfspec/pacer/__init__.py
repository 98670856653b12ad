"""Pacer's pre-verifier, trained for a checkpoint: network, inference, examples, labels, tuning, fitting."""
