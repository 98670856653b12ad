"""Pacer's pre-verifier, trained beside a checkpoint: network, inference, examples, labels, tuning, fitting."""
