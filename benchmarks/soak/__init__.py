"""The whole platform under load and faults for hours, and how long each recovery takes: ``python -m benchmarks.soak``."""
