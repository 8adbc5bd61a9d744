"""The jobs API with a long history behind it."""
