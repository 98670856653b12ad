"""Measures selfspec and its peers; nothing imports it."""
