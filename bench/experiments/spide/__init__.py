"""SPIDE to the letter: serial drafting and parallel verification by turns, played over recorded drafts."""
