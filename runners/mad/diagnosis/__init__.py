"""What a trained model gets wrong."""
