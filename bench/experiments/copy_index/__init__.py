"""What the index of copied drafts costs."""
