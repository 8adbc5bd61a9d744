"""Jobs that were given up after repeated failures of the platform."""
