"""Base models and their updates, and the mirror of adapters in MLflow."""
