"""Drafts with the model's own weights in fewer bits: what fine-tuning and other ways to round do to them."""
