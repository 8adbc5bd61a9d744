"""Everything a tenant has, exported or deleted."""
