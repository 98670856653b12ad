"""selfspec inside other people's programs: transformers' `generate`, folders for the hub, lm-evaluation-harness."""
