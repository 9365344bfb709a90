"""Reference language models: experiments with small models, one file per model in ``results/reference``."""
