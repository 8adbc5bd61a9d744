"""What serving takes: swaps of adapters under load, and adapters mixed in one batch."""
