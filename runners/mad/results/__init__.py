"""The results of studies."""
