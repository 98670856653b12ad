"""Which loss for the exits: uniform, or weighted by accepted length."""
