"""Background work beside the API: validation, exports, webhooks, rollout."""
