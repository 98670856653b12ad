"""One engine over several processes: rank 0 decides, the workers follow."""
