"""Logs, spans, redaction and provenance of every process."""
