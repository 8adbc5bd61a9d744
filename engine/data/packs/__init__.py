"""Tokenized datasets packed into windows, built once under a fingerprint."""
