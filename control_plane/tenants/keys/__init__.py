"""API keys of tenants and operators."""
