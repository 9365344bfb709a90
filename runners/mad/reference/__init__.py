"""Reference results: every layer on every task under the full protocol, one file a cell in ``results/reference``."""
