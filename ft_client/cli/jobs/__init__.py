"""Jobs, sweeps, evaluations, and the queue."""
