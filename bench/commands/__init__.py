"""The command line `selfspec-bench`: one file for each command, and what they share."""
