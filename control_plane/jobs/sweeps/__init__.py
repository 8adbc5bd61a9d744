"""Sweeps: many jobs from one request, and comparisons of jobs."""
