"""Rules at the settings that their papers give and at ones chosen on other prompts, and DEL in its readings."""
