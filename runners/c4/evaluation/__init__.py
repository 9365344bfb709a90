"""Evaluation of a trained language model."""
