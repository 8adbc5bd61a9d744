"""Whether an adapter may be promoted, and what to change in the next run."""
