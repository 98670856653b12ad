"""What the machine gives and takes: bandwidth, roofline, memory, contexts, busy neighbours."""
