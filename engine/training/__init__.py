"""Training: specs, hyperparameters, checkpoints, failures, and the process on the GPU (``runtime``)."""
