"""How many parts a row needs in the kernels."""
