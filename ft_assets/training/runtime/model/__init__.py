"""The model in training: weights, attention, precision, optimizers, log-probabilities."""
