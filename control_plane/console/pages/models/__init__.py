"""Pages about models: lineage, routes, base models."""
