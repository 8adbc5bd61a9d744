"""Adapters to external systems: a real and a local implementation of each protocol in ``control_plane.platform.protocols``."""
