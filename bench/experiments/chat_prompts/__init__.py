"""Chat prompts of four kinds, made from public prompt sets."""
