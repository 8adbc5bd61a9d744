"""Findings of a validation: problems, their causes, lengths, and the report."""
