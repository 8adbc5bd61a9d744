"""Products of the platform, in order of production: datasets, training, evals, adapters."""
