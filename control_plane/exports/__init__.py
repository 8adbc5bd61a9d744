"""Exports on devices: what the workload is, and how it starts. The orders are in :mod:`control_plane.adapters.exports`."""
