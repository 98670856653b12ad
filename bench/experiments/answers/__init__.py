"""What earlier answers to copy from gain: a session of edits of one file."""
