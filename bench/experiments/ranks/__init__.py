"""One model over several processes of a CPU, compared with one process."""
