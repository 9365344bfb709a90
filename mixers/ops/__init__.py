"""Functions on tensors; each chooses its own kernel."""
