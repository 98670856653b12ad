"""One engine over several processes: rank 0 decides, and the workers do the same."""
