"""Reference results: every layer on every task under the full protocol, one file per cell in ``results/reference``."""
