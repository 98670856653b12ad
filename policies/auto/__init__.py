"""The policy `auto`: the best rate of tokens per cost, and all that it takes into account."""
