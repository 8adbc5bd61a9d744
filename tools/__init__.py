"""Tools that generate parts of this repository from other parts."""
