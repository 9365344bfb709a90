"""What a trained language model can do."""
