"""Attention over a long context, beside what memory and arithmetic allow."""
