"""Files: uploaded at once or in parts."""
