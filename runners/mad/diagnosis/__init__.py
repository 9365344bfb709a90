"""Errors of a trained model: where it is wrong, what it confuses, and what its hidden states hold."""
