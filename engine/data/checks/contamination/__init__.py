"""Detects rows that repeat contamination lists."""
