"""Decides whether an adapter may be promoted, and advises on the next run."""
