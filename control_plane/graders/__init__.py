"""OpenAI's graders that need no model."""
