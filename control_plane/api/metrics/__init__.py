"""The platform's numbers for Prometheus."""
