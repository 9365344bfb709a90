"""A stack of RT layers at the width of language models, all layers at the same time."""
