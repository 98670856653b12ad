"""`python -m selfspec`, and so `torchrun --nproc-per-node 2 -m selfspec`."""

from selfspec.cli.main import main

main()
