"""What recorded rounds say about settings that were not run."""
