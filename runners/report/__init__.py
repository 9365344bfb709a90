"""The report: all stored results as one HTML page."""
