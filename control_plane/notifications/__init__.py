"""Webhooks and e-mail: outbox, endpoints, deliveries."""
