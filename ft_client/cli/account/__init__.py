"""Keys, members, usage, webhooks."""
