"""The engine: one thread that owns the model and answers requests of the base and of all adapters in one batch."""
