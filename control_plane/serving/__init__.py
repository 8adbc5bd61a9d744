"""Serving adapters: rollout, model routes, the gateway."""
