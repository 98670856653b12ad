"""One engine over several processes: the same decisions on all of them, and commands that one of them speaks for."""
