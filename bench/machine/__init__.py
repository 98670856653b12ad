"""What the machine gives and takes: bandwidth, roofline, memory, contexts, start-up, busy neighbours."""
