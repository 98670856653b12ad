"""Studies that are not part of the product; README.md lists what each showed and how to run it."""
