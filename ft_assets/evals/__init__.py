"""Evaluation: the adapter next to its base on the same items, and the gate that decides what may be served."""
