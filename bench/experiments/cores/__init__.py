"""Many cores and too few: what the parts of a phase cost, what that makes of a pass, and more threads than cores."""
