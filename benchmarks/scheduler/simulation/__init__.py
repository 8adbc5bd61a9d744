"""The simulated cluster: clock, policies, traces, and what is printed of them."""
