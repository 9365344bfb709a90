"""What studies reached."""
