"""Child processes with limits, for files that tenants upload."""
