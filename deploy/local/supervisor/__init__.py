"""Starts services, keeps them alive, and ends them."""
