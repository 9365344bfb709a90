"""The hyperparameter search."""
