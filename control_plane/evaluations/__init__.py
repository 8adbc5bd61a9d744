"""Evaluations of adapters: runs, verdicts, reports."""
