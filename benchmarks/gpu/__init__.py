"""Training on one GPU, by the training process itself: speed, memory against the estimate, packing, checkpoints and resume."""
