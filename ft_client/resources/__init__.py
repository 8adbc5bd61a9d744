"""The API's resources, one class each."""
