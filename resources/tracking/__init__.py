"""MLflow: runs, registered models, and what it records about tenants."""
