"""selfspec inside other people's programs: transformers' `generate`, and folders for the hub."""
