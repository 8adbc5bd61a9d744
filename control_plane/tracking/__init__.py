"""A job's metrics in other tools: sent to Weights & Biases, and as a file for TensorBoard."""
