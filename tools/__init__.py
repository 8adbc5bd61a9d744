"""What writes parts of this repository from other parts."""
