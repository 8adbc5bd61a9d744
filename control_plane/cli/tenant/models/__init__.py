"""Adapters, exports, routes, chat."""
