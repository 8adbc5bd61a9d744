"""What follows from the end of an export's attempt."""
