"""Reference language models: every layer in one small setting, one file a layer in ``results/reference``."""
