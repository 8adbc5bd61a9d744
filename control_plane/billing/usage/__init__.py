"""Usage of a tenant and its cost."""
