"""Adapters at the exits of a frozen model: what drafts see, and verification never does."""
