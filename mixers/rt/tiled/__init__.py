"""The published training method of the Recurrent Transformer, exact tiling with a custom backward, in plain PyTorch."""
