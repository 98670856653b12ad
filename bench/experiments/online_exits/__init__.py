"""Exit adapters that learn from a stream of answers of one kind, against those that it began with."""
