"""What the command line costs its user before it does anything."""
