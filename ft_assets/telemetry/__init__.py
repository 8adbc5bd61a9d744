"""Logs, spans, redaction and provenance: what every process says about its work."""
