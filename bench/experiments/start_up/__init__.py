"""How long commands take until they do something."""
