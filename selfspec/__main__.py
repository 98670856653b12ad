"""`python -m selfspec`."""

from selfspec.cli.main import main

main()
