"""Every record of the repository: what makes it, and one command that makes them all again."""
