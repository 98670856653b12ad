"""Texts that teach a small model to copy, and prompts whose answers are copied, made from word lists and templates."""
