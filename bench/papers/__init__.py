"""The papers as their authors ran them: presets as data, their prompts, and what a record says of their claims."""
