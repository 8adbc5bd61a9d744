"""Periodic work that requests no runs."""
