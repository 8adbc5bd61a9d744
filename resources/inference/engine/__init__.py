"""The engine: one thread that owns the model and answers requests for the base and all adapters in one batch."""
