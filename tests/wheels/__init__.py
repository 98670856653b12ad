"""Wheels that run anywhere, their checks, and what a release needs. Not a part of the wheels. See docs/releasing.md."""
