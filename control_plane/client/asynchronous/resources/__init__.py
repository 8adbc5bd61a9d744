"""The resources of the API, a class each."""
