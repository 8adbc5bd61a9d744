"""Adapters to the outside: each seam of ``control_plane.platform.protocols`` with a real and a local implementation."""
