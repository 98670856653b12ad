"""`python -m bench`, which `accelerate launch -m bench` needs: the same as `selfspec-bench`."""

from bench.commands.bench_app import main

if __name__ == "__main__":
    main()
