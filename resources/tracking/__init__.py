"""MLflow: runs, registered models, and erasure of a tenant's records."""
