"""The model during training: weights, attention, precision, optimizers, log-probabilities."""
