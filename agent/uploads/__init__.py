"""What an attempt stores: checkpoints, its log, and reference log-probabilities."""
