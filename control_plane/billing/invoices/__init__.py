"""Invoices: drafts and issued ones."""
