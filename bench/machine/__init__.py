"""What the machine can do and what decoding takes of it: bandwidth, roofline, memory, contexts, many texts, clients."""
