"""Training an ensemble of runs."""
