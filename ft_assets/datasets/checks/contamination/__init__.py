"""Whether rows repeat evaluation suites."""
