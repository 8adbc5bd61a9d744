"""When workloads ran, and what that costs."""
