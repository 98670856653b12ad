"""Tool calls: what requests say of tools, how a model writes a call, and calls found in what it writes."""
