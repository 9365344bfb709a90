"""The Feedback Transformer's layers in kernels, position after position; see ``passes``."""
