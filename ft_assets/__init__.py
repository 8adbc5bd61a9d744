"""What is produced, in the order it is produced: datasets, training, evals, adapters."""
