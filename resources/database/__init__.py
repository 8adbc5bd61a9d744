"""PostgreSQL of the control plane: the embedded server, engines, and migrations run from code."""
