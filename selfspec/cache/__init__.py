"""KV caches between calls: the pool, reuse of prefixes, and the index of text that drafts are copied from."""
