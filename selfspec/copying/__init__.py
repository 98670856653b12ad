"""Layer 0: drafts copied from what was read and written before (docs/copied-drafts.md)."""
