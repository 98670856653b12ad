"""Our own kernels for a CPU: a C library, how it is loaded, and the linears and decoder layers that call it."""
