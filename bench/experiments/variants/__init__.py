"""Each variant of the kernels that this machine runs, beside the others: single products and a whole model."""
