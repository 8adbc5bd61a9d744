"""Webhooks and e-mails: outbox, endpoints, deliveries."""
