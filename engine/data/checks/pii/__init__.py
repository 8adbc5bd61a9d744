"""Personal data and secrets: what is found in a text, and what a policy does about it."""
