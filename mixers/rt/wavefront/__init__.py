"""All layers of a Recurrent Transformer at the width of language models, at work at the same time; see ``passes``."""
