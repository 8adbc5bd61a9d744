"""Adapters on inference servers: rollout, routes, the gateway."""
