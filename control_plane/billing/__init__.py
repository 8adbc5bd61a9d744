"""Prices, the ledger, refunds, budgets, storage."""
