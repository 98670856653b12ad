"""How fast checkpoints of a real size load, and in how much memory."""
