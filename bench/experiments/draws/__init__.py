"""What a sampled token costs besides its logits."""
