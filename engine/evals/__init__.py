"""Evaluation: compares the adapter with its base on the same items; the gate decides what may be served."""
