"""Speed on a machine that others use, too."""
