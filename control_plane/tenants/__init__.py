"""Tenants, their members and limits."""
