"""A simulated cluster for the scheduling policy: jobs arrive on a virtual clock, and the platform's own policy decides."""
