"""A job's metrics in other tools: as a file for TensorBoard."""
