"""Reference language models: experiments with small models, one file a model in ``results/reference``."""
