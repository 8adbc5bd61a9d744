"""Installation of the platform."""
