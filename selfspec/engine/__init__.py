"""Decoding: sequences, rounds of draft and verification, acceptance, and the runners that run rows through the model."""
