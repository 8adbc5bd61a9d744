"""Logs, spans, redaction and provenance for every process."""
