"""Adversaries that generate cases: calls, errors, changed files and modules."""
