"""Pages about the account: bills, budgets, settings, and the tenant's data."""
