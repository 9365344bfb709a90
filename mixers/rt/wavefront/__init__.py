"""All layers of a wide Recurrent Transformer, computed at the same time on different positions; see ``passes``."""
