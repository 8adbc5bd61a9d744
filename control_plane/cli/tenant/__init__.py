"""Commands of tenants: over HTTP."""
