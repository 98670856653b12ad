"""The command line `selfspec`: one file for each group of commands, and what they share."""
